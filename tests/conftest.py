"""What all tests share: failed assertions in the helper modules show their values, as in the tests themselves."""

import pytest

pytest.register_assert_rewrite("gloo", "one_handle", "random_modules", "recording")
