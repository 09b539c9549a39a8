"""A process with one build of pyattn and this command line, whatever command line the build came with.

:mod:`pyattn.cli.bench.against` starts this file with a number, the pipe on which it is told what to run, and with JSON:
the ``paths`` of its imports, the ``folder`` that the library must lie in, or null for this installation, and the folder
``cli`` of this command line. It reports the build, or what is wrong with it, and serves until the pipe closes.
"""

import json
import sys
from importlib import machinery, util
from multiprocessing.connection import Connection
from pathlib import Path

import torch  # before the folder is searched, which may hold another one


def load(paths: list[str], folder: str | None, cli: str) -> dict[str, str]:
    """Import pyattn from ``folder`` and ``pyattn.cli`` from ``cli``. Returns facts about the build.

    Raises:
        ImportError: there is no pyattn in ``folder``, or it does not fit this torch.
    """
    sys.path[:] = paths
    if folder:  # an editable installation's finder would come first
        sys.meta_path[:] = [machinery.BuiltinImporter, machinery.FrozenImporter, machinery.PathFinder]
    import pyattn
    from pyattn import _C

    if folder and not Path(_C.__file__).is_relative_to(folder):
        raise ImportError(f"pyattn comes from {_C.__file__}")
    spec = util.spec_from_file_location("pyattn.cli", Path(cli, "__init__.py"), submodule_search_locations=[cli])
    if spec is None or spec.loader is None:
        raise ImportError(f"no command line in {cli}")
    sys.modules["pyattn.cli"] = module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {"version": _C.version, "isa": pyattn.isa(), "torch": torch.__version__, "compiler": _C.compiler}


def main(descriptor: str, options: str) -> None:
    """Report the build, then serve."""
    pipe = Connection(int(descriptor))
    try:
        facts = load(**json.loads(options))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}".splitlines()[0])
        return
    from pyattn.cli.bench.processes import serve

    pipe.send(facts)
    serve(pipe, str(sys.modules["pyattn"].__file__))


if __name__ == "__main__":
    main(*sys.argv[2:])
