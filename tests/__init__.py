"""The tests. Asserts in helper modules, too, show both sides and know what is data (tests/support/oracle.py)."""

from pathlib import Path

import pytest

pytest.register_assert_rewrite(*(
    f"{__name__}.{folder.name}" for folder in Path(__file__).parent.iterdir() if (folder / "__init__.py").exists()))
