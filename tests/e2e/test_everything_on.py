"""One deployment with every wall of docs/security.md up: certificates, the deployment's secret, the API key; and two D's that lack one.

Both legs are posted straight to P and D: no router in between passes the key on over https (docs/security.md).
"""

import concurrent.futures
import itertools
import json
import os
import pathlib
import ssl
import subprocess

import httpx
import pytest
from fleets import REGISTRY_KEY, SECRET, WAIT_S
from shims import until

from pdjax.serve.children import Child, end_all
from pdjax.serve.local import PROGRAM

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

API_KEY = "key-of-the-whole-test"
KEY = {"authorization": f"Bearer {API_KEY}"}
SIZES = ("--context-length", "128", "--num-pages", "64", "--chunked-prefill-size", "64")
START_S = 240.0
BODY = {
    "input_ids": list(range(5, 95)),  # more than one chunk
    "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
}
EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


def openssl(*words):
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=WAIT_S)


class Authority:
    """A certificate authority in a directory; each server has a certificate of its own for 127.0.0.1."""

    def __init__(self, directory: pathlib.Path, name: str):
        self._at = directory
        self.file, self._key = str(directory / f"{name}.pem"), str(directory / f"{name}.key")
        openssl("req", "-x509", *EC, "-subj", f"/CN={name}", "-out", self.file, "-keyout", self._key)

    def options(self, name: str) -> list[str]:
        cert, key, asked = (str(self._at / f"{name}.{kind}") for kind in ("crt", "key", "csr"))
        san = self._at / f"{name}.ext"
        san.write_text("subjectAltName=IP:127.0.0.1\n")
        openssl("req", "-new", *EC[:5], "-subj", f"/CN={name}", "-out", asked, "-keyout", key)
        signed = ("-CA", self.file, "-CAkey", self._key, "-days", "2", "-extfile", str(san))
        openssl("x509", "-req", "-in", asked, *signed, "-out", cert)
        return ["--ssl-certfile", cert, "--ssl-keyfile", key]


class Walled:
    """The processes, and a client that believes their authority."""

    def __init__(self, directory: pathlib.Path):
        self._at = directory
        self.children: dict[str, Child] = {}
        self.output: list[str] = []
        self.ours, self.others = Authority(directory, "ours"), Authority(directory, "others")
        self.http = self.client(self.ours.file)
        (directory / "api.key").write_text(API_KEY + "\n")
        (directory / "right.secret").write_bytes(SECRET + b"\n")
        (directory / "wrong.secret").write_bytes(b"of another test\n")

    @staticmethod
    def client(authority):
        context = ssl.create_default_context(cafile=authority)
        return httpx.Client(trust_env=False, timeout=WAIT_S, verify=context)

    def spawn(self, name, *options, secret="right"):
        command = [*PROGRAM, *options, "--host", "127.0.0.1", "--port", "0", *self.ours.options(name)]
        command += ["--disaggregation-secret-file", str(self._at / f"{secret}.secret")]
        self.children[name] = Child(
            name, command, {**os.environ, "PYTHONUNBUFFERED": "1"}, self.output.append
        )

    def serve(self, name, mode, secret="right", believed=None):
        options = ["serve", "--model", "tiny", *SIZES, "--api-key-file", str(self._at / "api.key")]
        options += ["--ssl-ca-file", (believed or self.ours).file, "--disaggregation-mode", mode]
        options += ["--drain-linger", "0"]
        if mode != "null":
            options += ["--disaggregation-bootstrap-host", "127.0.0.1", "--instance-id", name]
            options += ["--disaggregation-bootstrap-port", str(self.registry_port)]
        self.spawn(name, *options, secret=secret)

    def await_ready(self, *names):
        for name in names:
            child = self.children[name]
            assert until(lambda child=child: child.ready or not child.alive, START_S), self.output[-20:]
            child.check()

    @property
    def registry_port(self):
        return int(self.url("registry").rpartition(":")[2])

    def url(self, name):
        return self.children[name].ready["url"]

    def get(self, name, path, **kwargs):
        return self.http.get(f"{self.url(name)}{path}", **kwargs)

    def generate(self, name, headers=KEY, **more):
        return self.http.post(f"{self.url(name)}/generate", json={**BODY, **more}, headers=headers)

    def pair(self, room, p="prefill-0", d="decode-0"):
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.registry_port, "bootstrap_room": room}
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            return tuple(pool.map(lambda name: self.generate(name, **where), (p, d)))

    def is_ready(self, name):
        return self.get(name, "/readiness").status_code == 200

    def warnings(self, name):
        """Messages of its log."""
        start = f"[{name}] "
        events = [json.loads(one[len(start) :]) for one in self.output if one.startswith(start + '{"ts"')]
        return [one["message"] for one in events if one["level"] == "warning"]

    def registry(self, name):
        """(why it is not listed, what it counted) as the instance says."""
        state = self.get(name, "/server_info", headers=KEY).json()["internal_states"][0]
        return state["registry_error"], state["registry"]

    def close(self):
        self.http.close()
        return end_all(list(self.children.values()))


@pytest.fixture(scope="module")
def walled(tmp_path_factory):
    deployment = Walled(tmp_path_factory.mktemp("walled"))
    try:
        deployment.spawn("registry", "bootstrap")
        deployment.await_ready("registry")
        deployment.serve("prefill-0", "prefill")
        deployment.serve("decode-0", "decode")
        deployment.serve("plain-0", "null")
        deployment.serve("wrong-secret", "decode", secret="wrong")
        deployment.serve("wrong-ca", "decode", believed=deployment.others)
        deployment.await_ready(*deployment.children)
        assert until(lambda: all(map(deployment.is_ready, ("prefill-0", "decode-0", "plain-0"))), WAIT_S)
        yield deployment
    finally:
        late = deployment.close()
    assert late == [] and {child.process.returncode for child in deployment.children.values()} == {0}
    secrets = (API_KEY, SECRET.decode(), REGISTRY_KEY["authorization"].split()[1])
    assert not [line for line in deployment.output if any(secret in line for secret in secrets)]


def test_a_request_through_the_pair_has_the_tokens_of_one_server(walled):
    alone = walled.generate("plain-0").json()["output_ids"]
    assert len(alone) == BODY["sampling_params"]["max_new_tokens"]
    for room in range(1, 4):
        p, d = walled.pair(room)
        assert (p.status_code, d.status_code) == (200, 200), (p.text, d.text)
        assert d.json()["output_ids"] == alone and p.json()["output_ids"] == alone[:1]
        assert "pull_s" in d.json()["meta_info"]["times"], "it came over the transfer"


def test_probes_need_no_key_and_pass_through_the_pair_over_https(walled):
    for name in ("prefill-0", "decode-0"):
        assert walled.get(name, "/health_generate").status_code == 200


def test_who_has_no_key_or_does_not_believe_or_speaks_no_tls_gets_nothing(walled):
    for name in ("prefill-0", "decode-0", "plain-0"):
        for headers in ({}, {"authorization": "Bearer other"}, REGISTRY_KEY):
            assert walled.generate(name, headers).status_code == 401
        with pytest.raises(httpx.HTTPError):
            httpx.get(walled.url(name).replace("https", "http") + "/health", trust_env=False)
    for headers in ({}, KEY):
        assert walled.get("registry", "/list?role=decode", headers=headers).status_code == 401
    with walled.client(walled.others.file) as stranger:
        for name in ("registry", "prefill-0", "decode-0"):
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                stranger.get(f"{walled.url(name)}/health")


@pytest.mark.parametrize(
    ("name", "counter", "told"),
    [
        ("wrong-secret", "refused_401", "--disaggregation-secret-file"),
        ("wrong-ca", "registry_silent", "CERTIFICATE_VERIFY_FAILED"),
    ],
)
def test_a_d_with_the_wrong_file_is_not_listed_not_ready_and_says_why_once(walled, name, counter, told):
    assert until(lambda: walled.registry(name)[1].get(counter, 0) >= 2, WAIT_S), "it tries again"
    assert told in walled.registry(name)[0]
    assert not walled.is_ready(name)
    lines = walled.warnings(name)  # one for each fault; on a slow machine a silence may come between
    assert any(told in line for line in lines)
    assert all(one != other for one, other in itertools.pairwise(lines))
    listed = walled.get("registry", "/list?role=decode", headers=REGISTRY_KEY).json()["instances"]
    assert [one["instance_id"] for one in listed] == ["decode-0"]
    if name == "wrong-secret":
        assert walled.get("registry", "/health").json()["counters"]["unauthorized"] >= 2
