import json

import pytest

from softline.measure import Row
from softline.measure.environment import environment
from softline.measure.results import Results


def test_results_are_plain_data_with_fits():
    results = Results("ops", "softline bench ops", "a", {"batch": 1}, dict(environment()))
    for tokens in (100, 200):
        for milliseconds in (None, float(tokens)):
            results.hear(Row("a", "infer", tokens, f"{tokens} tokens", tokens, milliseconds))
    written = json.loads(json.dumps(results.to_dict()))
    assert [row["milliseconds"] for row in written["rows"]] == [100, 200]
    assert written["growth"][0]["time"]["exponent"] == pytest.approx(1)
    assert (written["command"], written["finished"]) == ("softline bench ops", False)
    assert {"torch", "timm", "commit", "threads", "cpu", "date", "native_bfloat16"} <= set(written["environment"])
