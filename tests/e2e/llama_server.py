"""A llama-server of its own for the tests: MODEL PORT KEY. Ends when its standard input does."""

from __future__ import annotations

import sys

import xllamacpp


def main() -> None:
    model, port, key = sys.argv[1:4]
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames, params.port = ["127.0.0.1"], int(port)
    params.api_keys = [key]
    params.cpuparams.n_threads = 1  # its threads wait by spinning: with all cores they would starve the gateway
    params.n_ctx, params.n_parallel, params.kv_unified = 8192, 2, False
    params.endpoint_metrics = params.endpoint_slots = True
    params.ctx_shift = False
    server = xllamacpp.Server(params)
    sys.stdin.read()
    del server


if __name__ == "__main__":
    main()
