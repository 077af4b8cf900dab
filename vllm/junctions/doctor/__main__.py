# SPDX-License-Identifier: Apache-2.0
"""Checks an installation, prints what is wrong and how to mend it.

Usage: ``python -m vllm.junctions.doctor [--kv-transfer-config JSON]
[--base-url URL]... [--prompt FILE]...``, in the environment and with the
environment variables of the server. Exit status 1 if anything failed.
"""

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Sequence

from vllm.junctions.doctor.findings import Finding, exit_status, summary


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm.junctions.doctor",
        description="Find out what keeps shared prefixes from hitting the store.",
    )
    parser.add_argument(
        "--kv-transfer-config", metavar="JSON", help="what the server gets as the same"
    )
    parser.add_argument(
        "--base-url",
        action="append",
        default=[],
        help="a running server, e.g. http://127.0.0.1:8000; several are compared",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="FILE",
        help="a prompt, as text or a JSON list of token ids; give two or more that "
        "should share a prefix. Needs --base-url",
    )
    parser.add_argument(
        "--only-servers",
        action="store_true",
        help="look at --base-url alone, from a machine that runs no server",
    )
    args = parser.parse_args(argv)
    if (args.prompt or args.only_servers) and not args.base_url:
        parser.error("--prompt and --only-servers need --base-url")
    return args


def findings(args: argparse.Namespace) -> Iterator[Finding]:
    """Run the checks that ``args`` ask for, one after the other."""
    from vllm.junctions.doctor import installation, server, store

    if not args.only_servers:
        yield from installation.check_versions()
        yield from installation.check_hooks()
        yield from installation.check_entry_point()
        if not args.base_url:
            yield from installation.check_hash_seed()
        yield from store.check_store()
    if args.kv_transfer_config is not None:
        yield from installation.check_transfer_config(args.kv_transfer_config)
    yield from server.check_servers(
        args.base_url, args.prompt, is_server_environment=not args.only_servers
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings; return the exit status."""
    args = parse_args(argv)
    # Findings are for people; what vLLM logs while it is imported is not.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.disable(logging.WARNING)
    seen = []
    for finding in findings(args):
        print(finding, flush=True)
        seen.append(finding)
    print(f"\n{summary(seen)}")
    return exit_status(seen)


if __name__ == "__main__":
    sys.exit(main())
