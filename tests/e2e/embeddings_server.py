"""A llama-server that makes embeddings, for the tests: MODEL PORT. Ends when its standard input does."""

from __future__ import annotations

import sys

import xllamacpp


def main() -> None:
    model, port = sys.argv[1:3]
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames, params.port = ["127.0.0.1"], int(port)
    params.cpuparams.n_threads = 1
    params.embedding = True
    params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    params.n_ctx = params.n_batch = params.n_ubatch = 1024  # a text must fit into one batch
    params.n_parallel = 1
    server = xllamacpp.Server(params)
    sys.stdin.read()
    del server


if __name__ == "__main__":
    main()
