"""Weights at a URL are downloaded once and checked."""

import pytest
from support.weight_files import digest, filled, net, pt, same

import treadle


def test_urls(server, tmp_path):
    url, asked = server
    state = filled().state_dict()
    right = digest(pt(state, tmp_path, "w.pt"))
    for source in (f"{url}/w.pt", f"{url}/to-w", f"file://{tmp_path}/w.pt", tmp_path / "w.pt"):
        model = net()
        treadle.load_weights(model, source, sha256=right)
        assert same(model, state)
    model = net()
    with pytest.warns(UserWarning, match=f"without a digest.* Pass sha256='{right}'"):
        treadle.load_weights(model, f"{url}/w.pt")
    assert same(model, state)
    treadle.load_weights(net(), f"file://{tmp_path}/w.pt")
    asked.clear()
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        treadle.load_weights(net(), f"{url}/w.pt", sha256="abc")
    with pytest.raises(ValueError, match=r"not a protocol that fsspec supports\. Did you mean 's3'"):
        treadle.load_weights(net(), "s4://bucket/w.pt", sha256=right)
    assert asked == []
    for source in (f"{url}/w.pt", f"file://{tmp_path}/w.pt", tmp_path / "w.pt"):
        with pytest.raises(ValueError, match="nothing in it was read"):
            treadle.load_weights(net(), source, sha256="0" * 64)
    with pytest.raises(OSError, match="file"):
        treadle.load_weights(net(), f"{url}/to-file", sha256=right)
    with pytest.raises(ValueError, match="bytes, the limit for downloads"):
        treadle.load_weights(net(), f"{url}/large", sha256=right)
    with pytest.raises(OSError, match="404"):
        treadle.load_weights(net(), f"{url}/none", sha256=right)
