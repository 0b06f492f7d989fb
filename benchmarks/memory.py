"""Resident memory of this process."""

from pathlib import Path

MIB = 2**20


def resident() -> int:
    """Bytes that are resident now."""
    return _status("VmRSS")


def reset_peak() -> bool:
    """Let the peak count from now on; returns False where the kernel does not allow that."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak() -> int:
    """The most bytes that were resident since ``reset_peak()``, or since the process began."""
    return _status("VmHWM")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
