"""Stands in for vLLM where Infera's wrapper imports and starts it (Infera at 5890f7f, infera/engine/vllm/).

The engine itself is the mock, in a process of its own as vLLM's would be.
"""
