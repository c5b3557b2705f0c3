"""Types a command in this process."""

import pytest

from soseleto.cli.main import main
from typing_in import Type


@pytest.fixture
def type_(capsys: pytest.CaptureFixture[str]) -> Type:
    def words(*given: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main([str(word) for word in given])
        out, err = capsys.readouterr()
        assert isinstance(left.value.code, int)
        return left.value.code, out, err

    return words
