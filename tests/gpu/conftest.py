"""``make test-gpu``: what it runs on, and what was left out."""

import accelerator
from bodies import LEFT_OUT


def pytest_terminal_summary(terminalreporter):
    if accelerator.ON_CUDA:
        terminalreporter.write_line(f"left out for lack of a second GPU: {', '.join(LEFT_OUT) or 'nothing'}")
