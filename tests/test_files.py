"""Tables that appear whole, on rows made up by hand."""

from fractions import Fraction

import numpy as np
import pytest

from jaxmoe.files import read_table, write_table


def test_columns_are_in_the_order_of_their_first_row_and_a_row_without_one_has_it_empty(tmp_path):
    path = tmp_path / "new" / "folder" / "table.csv"
    write_table(path, iter([{"name": "a, b", "us": 1}, {"us": 2, "seed": 3}, {"seed": None, "name": "µ"}]))
    assert path.read_bytes() == 'name,us,seed\n"a, b",1,\n,2,3\nµ,,\n'.encode()


def test_columns_that_are_given_stand_in_their_order(tmp_path):
    path = tmp_path / "table.csv"
    write_table(path, [{"b": 1, "a": 2}], ("a", "none", "b"))
    assert path.read_text() == "a,none,b\n2,,1\n"
    write_table(path, [], ["a", "b"])
    assert path.read_text() == "a,b\n"
    assert read_table(path) == []


@pytest.mark.parametrize("number", [1234.5678, np.float64(1234.5678), np.float32(1234.5678), Fraction(12345678, 10000)])
def test_digits_are_of_numbers_that_are_not_whole(tmp_path, number):
    path = tmp_path / "table.csv"
    row = {"not_whole": number, "even": 3.0, "large": 123456789.0, "undefined": np.nan}
    write_table(path, [row], digits=3)
    assert path.read_text().splitlines()[1] == "1.23e+03,3,1.23e+08,nan"


def test_whole_numbers_text_and_truth_values_keep_all_their_digits(tmp_path):
    path = tmp_path / "table.csv"
    row = {"whole": 123456, "numpy": np.int64(123456), "text": "1.23456", "yes": True, "numpy_no": np.bool_(False)}
    write_table(path, [row], digits=3)
    assert path.read_text().splitlines()[1] == "123456,123456,1.23456,True,False"


def test_without_digits_a_number_is_read_as_it_was(tmp_path):
    path = tmp_path / "table.csv"
    write_table(path, [{"x": 0.1 + 0.2}, {"x": np.float64(1 / 3)}])
    assert [float(row["x"]) for row in read_table(path)] == [0.1 + 0.2, 1 / 3]


def test_what_was_read_is_written_as_it_was(tmp_path):
    first, again = tmp_path / "first.csv", tmp_path / "again.csv"
    rows = [{"name": 'two\nlines, "quoted"', "us": "1.50", "note": ""}, {"name": " µ ", "us": "", "note": "x"}]
    write_table(first, rows)
    assert read_table(first) == rows
    write_table(again, read_table(first), digits=1)
    assert again.read_bytes() == first.read_bytes()


def failing():
    yield {"x": 1}
    raise OSError("no more rows")


@pytest.mark.parametrize(
    ("rows", "error"), [(failing(), OSError), ([{"x": 1}, {"x": 2, "y": 3}], ValueError)], ids=["rows", "column"]
)
def test_an_error_leaves_the_table_that_there_was(tmp_path, rows, error):
    path = tmp_path / "table.csv"
    write_table(path, [{"x": "old"}])
    with pytest.raises(error):
        write_table(path, rows, ["x"])
    assert read_table(path) == [{"x": "old"}]
    assert [each.name for each in tmp_path.iterdir()] == ["table.csv"]
