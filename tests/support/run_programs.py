"""Run programs one after the other in this process, each as a script of its own: ``run_programs.py FILE ...``."""

import sys
from pathlib import Path

for name in sys.argv[1:]:
    print(f"running {name}", flush=True)
    exec(compile(Path(name).read_text(), name, "exec"), {"__name__": "__main__"})
