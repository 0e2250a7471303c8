"""What Infera's wrapper asks vLLM's command line for (infera/engine/vllm/args.py)."""

import argparse


class _Parser(argparse.ArgumentParser):
    """Takes no offence at the many flags of vLLM that are not here."""

    def parse_args(self, args=None, namespace=None):
        return self.parse_known_args(args, namespace)[0]


def make_arg_parser(parser):
    """As vLLM's, a parser with the flags of `vllm serve`; the given one only says how it is made."""
    made = _Parser(prog=parser.prog, add_help=False, allow_abbrev=False)
    made.add_argument("--model")
    made.add_argument("--served-model-name", nargs="+")
    made.add_argument("--host", default="127.0.0.1")
    made.add_argument("--port", type=int, default=8000)
    made.add_argument("--block-size", type=int)
    made.add_argument("--trust-remote-code", action="store_true")
    made.add_argument("--kv-cache-dtype", default="auto")
    made.add_argument("--kv-transfer-config")
    made.add_argument("--data-parallel-size", type=int, default=1)
    made.add_argument("--data-parallel-rank", type=int)
    return made
