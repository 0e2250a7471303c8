"""Renders manifests and holds them against the schemas of Kubernetes.

    render.py kustomize FOLDER
    render.py helm CHART VALUES_AS_JSON
    render.py file FILE
    render.py values CHART

Prints the objects as a JSON list, or {"refused": "..."} where Helm refuses the values; `values` prints
the chart's values and its schema. Ends with 1 and a list of what is wrong where an object does not fit.
"""

import json
import pathlib
import subprocess
import sys

import kubernetes_validate
import yaml

# Of the Prometheus operator; the schemas of Kubernetes know nothing of them.
FOREIGN = {"PodMonitor", "ServiceMonitor"}
VERSIONS = ["1.30", "1.34", "1.37"]


class OneOfEach(yaml.SafeLoader):
    """As the API server, refuses a key that stands twice."""


def mapping(loader, node):
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    twice = {str(key) for key in keys if keys.count(key) > 1}
    if twice:
        raise yaml.YAMLError(f"{', '.join(twice)} stands twice{node.start_mark}")
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


OneOfEach.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)


def documents(text):
    return [one for one in yaml.load_all(text, Loader=OneOfEach) if one]


def kustomize(folder):
    kubectl = pathlib.Path(sys.executable).with_name("kubectl")
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"kubectl kustomize {folder}: {done.stderr}")
    return documents(done.stdout)


def helm(chart, values):
    import helm_python

    lint = helm_python.lint(chart, strict=True)
    if lint["errors"]:
        sys.exit(f"helm lint {chart}: {lint['errors']}")
    with helm_python.Chart.load(chart) as loaded:
        try:
            values = json.loads(values)
            loaded.validate_schema(loaded.merge_values(values))
            files = loaded.render(values, name="lastgasp", namespace="lastgasp")
        except helm_python.HelmError as error:
            print(json.dumps({"refused": str(error)}))
            sys.exit()
    return [one for name, text in sorted(files.items()) if name.endswith(".yaml") for one in documents(text)]


def validate(objects):
    wrong = []
    for one in objects:
        name = f"{one.get('kind')}/{one.get('metadata', {}).get('name')}"
        if one.get("kind") in FOREIGN:
            continue
        for version in VERSIONS:
            try:
                kubernetes_validate.validate(one, version, strict=True)
            except Exception as error:
                wrong.append(f"{name}, Kubernetes {version}: {error}")
    if wrong:
        sys.exit("\n".join(wrong))


def main():
    what, *arguments = sys.argv[1:]
    if what == "values":
        chart = pathlib.Path(arguments[0])
        values = yaml.load((chart / "values.yaml").read_text(), Loader=OneOfEach)
        print(json.dumps({"values": values, "schema": json.loads((chart / "values.schema.json").read_text())}))
        return
    render = {"kustomize": kustomize, "helm": helm, "file": lambda file: documents(pathlib.Path(file).read_text())}
    objects = render[what](*arguments)
    validate(objects)
    print(json.dumps(objects))


main()
