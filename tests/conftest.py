"""What all tests share: failed assertions in the helper modules show their values, as in the tests themselves."""

import signal

import pytest

pytest.register_assert_rewrite("gloo", "one_handle", "random_modules", "recording")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts what runs in its background deaf to Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
