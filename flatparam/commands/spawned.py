"""The first module of a process that multiprocessing spawned for a script under ``python -m flatparam run``."""

if __name__ == "__mp_main__":
    from flatparam.commands.run import become_child

    become_child(globals())
