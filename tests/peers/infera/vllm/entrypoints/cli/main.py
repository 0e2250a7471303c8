"""`python -m vllm.entrypoints.cli.main serve …`, as Infera's wrapper starts it: becomes the mock engine.

`MOCK_ENGINE` holds its command line so far, as a list in JSON.
"""

import argparse
import json
import os
import sys

from vllm.entrypoints.openai.cli_args import make_arg_parser

if __name__ == "__main__":
    if sys.argv[1:2] != ["serve"]:
        sys.exit(f"only `serve` is known here, not {sys.argv[1:]}")
    known = make_arg_parser(argparse.ArgumentParser()).parse_args(sys.argv[2:])
    command = json.loads(os.environ["MOCK_ENGINE"])
    os.execv(command[0], [*command, "--model", known.model, "--host", known.host, "--port", str(known.port)])
