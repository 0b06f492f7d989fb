"""What programs write to their output, write by write: ranks share it, so lines in several writes may be mixed."""

import os
import tempfile

import forked_scripts


def run_and_read_writes(command, **settings):
    """Run a command; return (exit code, each write to its standard output, its standard error).

    Python's own buffers are off, as in many containers: a line is one write if the program makes it so.
    """
    reader, writer = os.pipe2(os.O_DIRECT)  # each read returns one write
    settings["env"] = {**settings["env"], "PYTHONUNBUFFERED": "1"}
    with os.fdopen(reader, "rb", buffering=0) as output, tempfile.TemporaryFile() as errors:
        process = forked_scripts.Popen(command, stdout=writer, stderr=errors, **settings)
        os.close(writer)
        writes = []
        while written := output.read(1 << 16):
            writes.append(written.decode())
        code = process.wait()
        errors.seek(0)
        return code, writes, errors.read().decode()
