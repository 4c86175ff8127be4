"""Entry of the background process of `lpx serve --detach`: `python -m lpxbuild.server.daemon PIPE CALL_AS_JSON`.

Prints the pid of the process that serves and leaves it to itself, in a session of its own.
"""

from __future__ import annotations

import json
import os
import sys


def main(arguments: list[str]) -> int:
    """Fork once, so that the server is nobody's child and leaves no zombie behind when it ends."""
    descriptor = int(arguments[0])
    os.set_inheritable(descriptor, False)
    child = os.fork()
    if child:
        sys.stdout.write(str(child))
        return 0
    os.setsid()
    # The starter reads this pipe to its end; whoever serves must not hold it.
    with open(os.devnull, "w") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 1)
    from lpxbuild.server.serving import serve_detached

    return serve_detached(descriptor, json.loads(arguments[1]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
