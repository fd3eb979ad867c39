"""Damaged inputs bring out nothing but the project's own errors, in time and in bounded memory."""

import fuzz_readers
import pytest
import readers

ABLE = [name for name, reader in readers.READERS.items() if not reader.lacks]


def test_what_the_fuzzer_takes_as_a_failure(tmp_path):
    def outcome(error):
        def read(path, rng):
            raise error

        return fuzz_readers.run(readers.Reader("none", list, read, "file"), tmp_path, readers.Random(0))

    assert outcome(readers.TraceError(f"{tmp_path}/file: damaged; get it again")) == "refused"
    assert "poor message" in outcome(readers.TraceError("damaged"))
    assert "poor message" in outcome(readers.TraceError(f"{tmp_path}/file:\ndamaged"))
    assert "KeyError" in outcome(KeyError(str(tmp_path)))


@pytest.mark.parametrize("name", ABLE)
def test_a_few_damaged_inputs(name):
    told = [case for case in fuzz_readers.cases(readers.READERS[name], seed=0, last=20) if "outcome" in case]
    assert len(told) == 20
    assert [case for case in told if case["outcome"] not in ("read", "refused")] == []


@pytest.mark.slow
def test_many_damaged_inputs():
    """In processes whose memory is limited; takes minutes."""
    found = fuzz_readers.fuzz(20_000, seed=0, names=list(readers.READERS))
    failures = [failure for tally in found.values() for failure in tally.failures]
    assert not failures, "\n\n".join(failures[:5])
    assert sum(tally.cases for tally in found.values()) == 20_000
    assert min(tally.read for tally in found.values()) > 0  # some damage changes nothing that matters
    assert max(tally.peak for tally in found.values()) < fuzz_readers.MOST_BYTES
