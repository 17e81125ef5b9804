"""The tests. Asserts in helper modules, too, show both sides and know what is data (tests/support/oracle.py)."""

import importlib.util
from pathlib import Path

if importlib.util.find_spec("pytest") is not None:  # the demonstration takes its servers from here, without it
    import pytest

    pytest.register_assert_rewrite(
        *(
            f"{__name__}.{folder.name}"
            for folder in Path(__file__).parent.iterdir()
            if (folder / "__init__.py").exists()
        )
    )
