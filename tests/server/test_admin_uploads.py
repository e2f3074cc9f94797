"""Uploads: hard limits while they stream, names of files never looked at, and nothing left behind."""

import asyncio
import pickle
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.adapters import AdapterLimits
from loraplex.core import AdapterRefused, BaseDescription, LoraplexError
from loraplex.registry import AdapterFacts, Registry, RegistryConfig, Role, StoreFull
from loraplex.registry.blobs import StagedBlob
from loraplex.registry.uploads import MAX_UPLOADS, Uploads
from loraplex.server.admin_uploads import UploadForm
from tests.cli.hostile import GOOD_CONFIG, GOOD_WEIGHTS, Hostile, hostile_files, leftovers
from tests.registry.conftest import make_world  # noqa: F401  (a fixture)
from tests.registry.helpers import OPERATOR, MakeWorld, World, check_here

from .admin_site import FINGERPRINT, AdminSite, form
from .helpers import LiveServer, assert_error, wait_until

pytestmark = pytest.mark.anyio
MAX_BYTES = 8 * 2**20
PATH = "tenants/acme/adapters/support/versions"
TYPE = {"Content-Type": "multipart/form-data; boundary=xyz"}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """On SQLite only: uploads know no database."""
    settings = RegistryConfig(tmp_path / "data", adapter_limits=AdapterLimits(max_bytes=MAX_BYTES))
    with Registry(settings, validate=check_here) as registry:
        yield World(registry, tmp_path, settings, validate=check_here)


@pytest.fixture
def site(world: World) -> AdminSite:
    return AdminSite(world)


def part(name: str, data: bytes, header: str = "") -> bytes:
    return f'--xyz\r\nContent-Disposition: form-data; name="{name}"{header}\r\n\r\n'.encode() + data + b"\r\n"


def whole(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--xyz--\r\n"


FILES = (part("config", GOOD_CONFIG), part("weights", GOOD_WEIGHTS))
CLAIM = part("base_fingerprint", FINGERPRINT.encode())


async def send(
    site: AdminSite, content: Any, headers: dict[str, str] = TYPE, *, key: str | None = None, path: str = PATH
) -> httpx.Response:
    async with site.client(key or site.admin) as client:
        return await client.post(path, content=content, headers=headers)


def num_versions(site: AdminSite) -> int:
    try:
        return len(site.world.registry.adapters.show(OPERATOR, "acme", "support").versions)
    except LoraplexError:
        return 0


async def test_an_upload_is_a_version_and_leaves_only_the_stored_files(site: AdminSite, tmp_path: Path) -> None:
    response = await send(site, whole(*FILES, CLAIM, part("source", b"hf:acme/support@abc")))
    assert response.status_code == 201, response.text
    files = {file["name"]: file for file in response.json()["files"]}
    assert files["adapter_model.safetensors"]["bytes"] == len(GOOD_WEIGHTS)
    left = leftovers(tmp_path / "data")
    assert sorted(Path(path).name for path in left) == sorted(file["sha256"] for file in files.values())
    entries = site.world.registry.audit_entries(OPERATOR, "acme")
    assert entries[-1].details["source"] == "hf:acme/support@abc"


@pytest.mark.parametrize(
    "name", ["../../escape", "/etc/passwd", "..\\..\\x", "a\x00b", "", "x" * 3000, "adapter_model.bin"]
)
async def test_the_name_of_a_file_is_not_looked_at(site: AdminSite, tmp_path: Path, name: str) -> None:
    config = part("config", GOOD_CONFIG, f'; filename="{name}"')
    weights = part("weights", GOOD_WEIGHTS, f"; filename*=utf-8''..%2F..%2Fescape; filename=\"{name}\"")
    before = {path for path in tmp_path.parent.rglob("*") if tmp_path / "data" not in path.parents}
    response = await send(site, whole(config, weights, CLAIM))
    assert response.status_code == 201, response.text
    assert len(leftovers(tmp_path / "data")) == 2
    assert {path for path in tmp_path.parent.rglob("*") if tmp_path / "data" not in path.parents} == before


async def test_nobody_saying_which_base_must_be_said(site: AdminSite) -> None:
    assert_error(await send(site, whole(*FILES)), 400, code="invalid_request", param="base_fingerprint")
    said = await send(site, whole(*FILES, part("base_unverified", b"true")))
    assert (said.status_code, said.json()["base_verified"]) == (201, False)
    no = await send(site, whole(*FILES, part("base_unverified", b"false")))
    assert_error(no, 400, code="invalid_request", param="base_fingerprint")
    bad = await send(site, whole(*FILES, part("base_unverified", b"yes")))
    assert_error(bad, 400, code="invalid_request", param="base_unverified")


async def test_another_base_is_refused_and_recorded(site: AdminSite) -> None:
    response = await send(site, whole(*FILES, part("base_fingerprint", b"1" * 64)))
    assert_error(response, 400, code="adapter_refused")
    assert response.json()["error"]["reason"] == "BASE_MISMATCH"
    assert num_versions(site) == 1


BROKEN = {
    "empty": b"",
    "no form": b"hello",
    "only the end": b"--xyz--\r\n",
    "no last boundary": b"".join((*FILES, CLAIM)),
    "cut in the weights": part("config", GOOD_CONFIG) + part("weights", GOOD_WEIGHTS)[:-40],
    "cut in a header": b'--xyz\r\nContent-Disposition: form-data; name="con',
    "no weights": whole(part("config", GOOD_CONFIG), CLAIM),
    "no config": whole(part("weights", GOOD_WEIGHTS), CLAIM),
    "config twice": whole(part("config", GOOD_CONFIG), *FILES, CLAIM),
    "weights twice": whole(*FILES, part("weights", b"x"), CLAIM),
    "two claims": whole(*FILES, CLAIM, part("base_unverified", b"true")),
    "claim twice": whole(*FILES, CLAIM, CLAIM),
    "unknown part": whole(*FILES, CLAIM, part("path", b"/etc/passwd")),
    "a url": whole(*FILES, CLAIM, part("url", b"http://169.254.169.254/")),
    "part without a name": whole(b"--xyz\r\nContent-Disposition: form-data\r\n\r\nx\r\n", *FILES, CLAIM),
    "part without headers": whole(b"--xyz\r\n\r\nx\r\n", *FILES, CLAIM),
    "many headers": whole(b"--xyz\r\n" + b"A: b\r\n" * 50 + b"\r\nx\r\n", *FILES, CLAIM),
    "long header": whole(b"--xyz\r\nA: " + b"b" * 100_000 + b"\r\n\r\nx\r\n", *FILES, CLAIM),
    "long field": whole(*FILES, part("base_fingerprint", b"0" * 5000)),
    "long source": whole(*FILES, CLAIM, part("source", b"x" * 301)),
    "source with a line": whole(*FILES, CLAIM, part("source", b"a\nb")),
    "field that is no text": whole(*FILES, part("base_fingerprint", b"\xff" * 64)),
    "config too large": whole(part("config", b" " * (2**20 + 1)), FILES[1], CLAIM),
    "weights too large": whole(FILES[0], part("weights", bytes(MAX_BYTES + 1)), CLAIM),
}


@pytest.mark.parametrize("case", BROKEN)
async def test_forms_that_are_not_right_are_refused_and_leave_nothing(
    site: AdminSite, tmp_path: Path, case: str
) -> None:
    response = await send(site, BROKEN[case])
    assert_error(response, 400)
    assert leftovers(tmp_path / "data") == []
    assert num_versions(site) == 0


@pytest.mark.parametrize("size", [1, 7, 100])
async def test_a_form_may_arrive_in_small_pieces(site: AdminSite, size: int) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), size):
            yield body[start : start + size]

    body = whole(*FILES, CLAIM)
    response = await send(site, pieces())
    assert response.status_code == 201, response.text


async def test_too_many_bytes_are_noticed_while_they_stream(site: AdminSite, tmp_path: Path) -> None:
    """An endless part: the answer comes after a few megabytes, not at its end."""
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        yield FILES[0] + part("weights", b"")[:-2]
        while sent < 2**30:
            sent += 2**16
            yield bytes(2**16)

    assert_error(await send(site, endless()), 400, code="adapter_refused")
    assert sent < 2 * MAX_BYTES
    assert leftovers(tmp_path / "data") == []


@pytest.mark.parametrize(
    "content_type",
    [
        *("", "application/json", "application/x-www-form-urlencoded", "multipart/mixed; boundary=xyz"),
        *("multipart/form-data", "multipart/form-data; boundary=", f"multipart/form-data; boundary={'x' * 71}"),
    ],
)
async def test_other_content_is_a_415(site: AdminSite, content_type: str) -> None:
    assert_error(await send(site, whole(*FILES, CLAIM), {"Content-Type": content_type}), 415)


async def test_compressed_content_is_a_415(site: AdminSite) -> None:
    assert_error(await send(site, whole(*FILES, CLAIM), {**TYPE, "Content-Encoding": "gzip"}), 415)


async def test_a_declared_length_past_the_limit_is_a_413(site: AdminSite, tmp_path: Path) -> None:
    assert_error(await send(site, b"x", {**TYPE, "Content-Length": str(2**40)}), 413, code="request_too_large")
    assert leftovers(tmp_path / "data") == []


async def test_an_upload_that_stands_still_is_given_up(site: AdminSite, tmp_path: Path) -> None:
    async def stuck() -> AsyncIterator[bytes]:
        yield FILES[0]
        await asyncio.sleep(10)
        yield FILES[1]

    assert_error(await send(site, stuck()), 408, code="request_timeout")
    assert leftovers(tmp_path / "data") == []


async def test_uploads_have_places(site: AdminSite, tmp_path: Path) -> None:
    """One more than there are places for is told to come back; a place that is left can be taken."""
    gate = asyncio.Event()

    async def waiting() -> AsyncIterator[bytes]:
        yield FILES[0]
        await gate.wait()
        yield FILES[1] + CLAIM + b"--xyz--\r\n"

    tenants = [f"t{number}" for number in range(MAX_UPLOADS)]
    for tenant in tenants:
        site.world.tenant(tenant)
    running = [
        asyncio.create_task(
            send(site, waiting(), key=site.world.key(tenant, Role.TENANT_ADMIN), path=PATH.replace("acme", tenant))
        )
        for tenant in tenants
    ]
    uploads = tmp_path / "data" / "uploads"
    while len(list(uploads.iterdir())) < MAX_UPLOADS:
        await asyncio.sleep(0.01)
    refused = await send(site, whole(*FILES, CLAIM))
    gate.set()
    done = await asyncio.gather(*running)
    assert_error(refused, 503, code="overloaded")
    assert refused.headers["retry-after"] == "5"
    assert [response.status_code for response in done] == [201] * MAX_UPLOADS
    assert (await send(site, whole(*FILES, CLAIM))).status_code == 201
    assert list(uploads.iterdir()) == []


async def test_a_tenant_has_one_upload_at_a_time_and_others_go_on(site: AdminSite, tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def waiting() -> AsyncIterator[bytes]:
        yield FILES[0]
        await gate.wait()
        yield FILES[1] + CLAIM + b"--xyz--\r\n"

    running = asyncio.create_task(send(site, waiting()))
    while not list((tmp_path / "data" / "uploads").iterdir()):
        await asyncio.sleep(0.01)
    refused = await send(site, whole(*FILES, CLAIM))
    assert_error(refused, 429, code="caller_limit")
    assert refused.headers["retry-after"] == "5"
    other = await send(site, whole(*FILES, CLAIM), key=site.operator, path=PATH.replace("acme", "beta"))
    assert other.status_code == 201
    gate.set()
    assert (await running).status_code == 201
    assert (await send(site, whole(*FILES, CLAIM))).status_code == 201


async def test_an_upload_that_trickles_is_given_up(site: AdminSite, tmp_path: Path) -> None:
    """Each byte comes in time, and all of them together would take for ever."""
    sent = 0

    async def trickle() -> AsyncIterator[bytes]:
        nonlocal sent
        yield FILES[0] + part("weights", b"")[:-2]
        while sent < 100:
            sent += 1
            await asyncio.sleep(0.1)
            yield b"x"

    assert_error(await send(site, trickle()), 408, code="request_timeout")
    assert 10 < sent < 40  # the site gives a client 2 s
    assert leftovers(tmp_path / "data") == []


async def test_an_upload_that_is_slow_and_steady_is_taken(site: AdminSite) -> None:
    data = whole(FILES[0], part("weights", bytes(80 * 2**10)), CLAIM)  # nothing to serve, and at 32 KB/s

    async def steady() -> AsyncIterator[bytes]:
        for number in range(0, len(data), len(data) // 25 + 1):
            await asyncio.sleep(0.1)
            yield data[number : number + len(data) // 25 + 1]

    assert_error(await send(site, steady()), 400, code="adapter_refused")


async def test_an_upload_without_room_is_refused(site: AdminSite, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 70 * 2**20

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    with pytest.raises(StoreFull), site.world.registry.upload_directory(7 * 2**20):
        pass
    with site.world.registry.upload_directory(5 * 2**20) as directory:
        assert directory.is_dir()


async def test_a_full_disk_while_writing_is_a_507(
    site: AdminSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: UploadForm, data: bytes, start: int, end: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(UploadForm, "_take", full)
    assert_error(await send(site, whole(*FILES, CLAIM)), 507, code="store_full")
    assert leftovers(tmp_path / "data") == []


def test_what_a_crash_left_is_swept_when_it_is_old(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path / "uploads")
    old = tmp_path / "uploads" / "old"
    old.mkdir()
    (old / "weights").write_bytes(b"x")
    assert uploads.sweep(old.stat().st_mtime - 1) == 0
    assert old.exists()
    assert uploads.sweep(old.stat().st_mtime + 1) == 1
    assert not old.exists()


async def test_without_the_count_too_many_bytes_are_taken(site: AdminSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant of the test of endless parts: parts without a limit."""
    take = UploadForm._take

    def uncounted(self: UploadForm, data: bytes, start: int, end: int) -> None:
        self._room = 2**40
        take(self, data, start, end)

    monkeypatch.setattr(UploadForm, "_take", uncounted)
    sent = 0

    async def long() -> AsyncIterator[bytes]:
        nonlocal sent
        yield FILES[0] + part("weights", b"")[:-2]
        while sent < 3 * MAX_BYTES:
            sent += 2**20
            yield bytes(2**20)

    await send(site, long())
    assert sent == 3 * MAX_BYTES


def test_a_client_that_goes_away_leaves_nothing(site: AdminSite, tmp_path: Path) -> None:
    uploads = tmp_path / "data" / "uploads"
    server = LiveServer(site.app)
    try:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            head = f"POST /admin/v1/{PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {site.admin}\r\n"
            head += f"Content-Type: {TYPE['Content-Type']}\r\nContent-Length: 1000000\r\n\r\n"
            connection.sendall(head.encode() + FILES[0] + part("weights", b"")[:-2] + bytes(1000))
            wait_until(lambda: len(list(uploads.iterdir())) == 1)
        wait_until(lambda: list(uploads.iterdir()) == [])
    finally:
        server.stop()
    assert num_versions(site) == 0


async def test_an_upload_of_a_stranger_is_refused_before_its_bytes(site: AdminSite, tmp_path: Path) -> None:
    taken = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal taken
        taken += 1
        yield whole(*FILES, CLAIM)

    async with site.client(site.admin) as client:
        response = await client.post("tenants/beta/adapters/x/versions", content=pieces(), headers=TYPE)
    assert_error(response, 404, code="tenant_not_found")
    assert taken == 0


# ---------------------------------------------------------------------- hostile files (RELIABILITY.md, T01)
CASES = [case.name for case in hostile_files(Path("/nowhere"))]


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_hostile_corpus_is_large_and_its_pickles_do_work(tmp_path: Path) -> None:
    """Without this a canary that never sings proves nothing."""
    assert len(CASES) == len(set(CASES)) >= 120
    for case in hostile_files(tmp_path / "canary"):
        if case.name.startswith("pickle ") and case.name.split()[-1].isdigit():
            canary = tmp_path / "canary"
            pickle.loads(case.weights)
            assert canary.exists(), case.name
            canary.rmdir() if canary.is_dir() else canary.unlink()


async def test_hostile_files_are_refused_and_never_run(site: AdminSite, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    async with site.client(site.admin) as client:
        for case in hostile_files(canary):
            response = await client.post(PATH, **form(case.config, case.weights))
            assert_error(response, 400, code="adapter_refused")
            assert response.json()["error"]["reason"], case.name
            assert not canary.exists(), case.name
            assert leftovers(tmp_path / "data") == [], case.name
    assert all(version.artifact is None for version in _versions(site))
    assert len(_versions(site)) == len(CASES)


async def test_a_reader_that_falls_back_to_pickle_is_noticed(make_world: MakeWorld, tmp_path: Path) -> None:  # noqa: F811
    """The mutant of the test above: what is no safetensors file is loaded as a pickle."""

    def careless(config: StagedBlob, weights: StagedBlob, base: BaseDescription) -> AdapterFacts:
        try:
            return check_here(config, weights, base)
        except AdapterRefused:
            pickle.loads(weights.path.read_bytes())
            raise

    site = AdminSite(make_world(validate=careless))
    canary = tmp_path / "canary"
    case = next(case for case in hostile_files(canary) if case.name == "pickle mkdir 4")
    async with site.client(site.admin) as client:
        assert_error(await client.post(PATH, **form(case.config, case.weights)), 400)
    assert canary.exists()


def _versions(site: AdminSite) -> tuple[Any, ...]:
    return site.world.registry.adapters.show(OPERATOR, "acme", "support").versions


async def test_hostile_files_in_the_real_sandbox(make_world: MakeWorld, tmp_path: Path) -> None:  # noqa: F811
    """A sample of each kind; the child process is what a server runs."""
    site = AdminSite(make_world(validate=None))
    canary = tmp_path / "canary"
    sample: list[Hostile] = [*hostile_files(canary)][::15]
    async with site.client(site.admin) as client:
        for case in sample:
            response = await client.post(PATH, **form(case.config, case.weights))
            assert_error(response, 400, code="adapter_refused")
            assert not canary.exists(), case.name
        good = await client.post(PATH, **form(GOOD_CONFIG, GOOD_WEIGHTS))
    assert good.status_code == 201, good.text
    assert len(leftovers(tmp_path / "data")) == 2
