"""A job's large result → where its caller or the operator says. Runs on the I/O pool; may hold its thread a while.

The bytes go by one PUT each, to a bucket as to a caller's own presigned URL, with the checks of `web.py`: only the
operator's bucket may be at a private address. botocore only signs. Its clients aren't used: they read the machine's AWS
files and variables, load for long, follow redirects unchecked, and for some names of buckets ask the endpoint for a
session while they sign, which a caller could point at whatever is near the worker.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit, urlunsplit

import requests
import urllib3

from whisper_worker import web
from whisper_worker.errors import UploadFailed, UploadRefused
from whisper_worker.request import S3Config
from whisper_worker.settings import Settings
from whisper_worker.stop import Stop
from whisper_worker.web import without_secrets

SILENCE_S = (
    30.0  # storage may work on a large object for a while before it answers; also how late a stop can be noticed
)
PUT_EXPIRES_S = 3600  # how long our own link for a PUT is good: any upload, on a clock that is somewhat wrong
MAX_ID_LENGTH = 200
DEFAULT_REGION = "us-east-1"  # of AWS; most others take it for theirs
REGION = re.compile(r"(?:^|\.)s3[.-](?:dualstack\.)?([a-z]+-[a-z0-9-]+)\.[a-z0-9-]+\.[a-z.]+$")
AWS = re.compile(r"^s3[.-](?:.+\.)?amazonaws\.com(?:\.cn)?$")
HOST_LABEL = re.compile(r"^[a-z0-9-]{3,63}$")


@dataclass(frozen=True)
class UploadLimits:
    timeout_s: float = 120.0
    """For all files of one call, tries and pauses included."""
    attempts: int = 4


@dataclass(frozen=True)
class File:
    name: str
    data: bytes = field(repr=False)
    content_type: str


@dataclass(frozen=True)
class Bucket:
    endpoint_url: str = field(repr=False)  # with a password, perhaps
    name: str
    access_key_id: str
    secret_access_key: str = field(repr=False)
    region: str | None
    is_trusted: bool
    """The operator's own, which may be at a private address."""

    @classmethod
    def of_settings(cls, settings: Settings) -> "Bucket | None":
        url, name = settings.bucket_endpoint_url, settings.bucket_name
        key, secret = settings.bucket_access_key_id, settings.bucket_secret_access_key
        if url is None or name is None or key is None or secret is None:
            return None
        return cls(url, name, key, secret.get_secret_value(), settings.bucket_region, is_trusted=True)

    @classmethod
    def of_job(cls, config: S3Config) -> "Bucket":
        return cls(
            config.endpoint_url,
            config.bucket_name,
            config.access_id,
            config.access_secret,
            region=None,
            is_trusted=False,
        )

    def url(self, key: str) -> str:
        """The object's, not signed. Raises ValueError where the endpoint is no URL.

        RunPod's users have endpoints with and without the bucket before the host. AWS wants it there, others after it.
        Where it may be a part of the host's own name it is named once more, as RunPod's SDK does: to storage that takes
        it from the host, this is a folder.
        """
        parts = urlsplit(without_secrets(self.endpoint_url))
        host, path = parts.netloc, parts.path.rstrip("/")
        if not host:
            raise ValueError("no host")
        is_named = host.startswith((f"{self.name}.s3.", f"{self.name}.s3-"))
        if not is_named and AWS.match(host) and HOST_LABEL.match(self.name):
            host = f"{self.name}.{host}"
        elif not is_named:
            path += f"/{quote(self.name, safe='')}"
        return urlunsplit((parts.scheme, host, f"{path}/{quote(key, safe='/')}", "", ""))

    def signed_url(self, method: str, key: str, expires_s: int, content_type: str | None = None) -> str:
        """For one method, and with a `content_type` only for a request that has it. Touches no network and no file."""
        # Here, as they take long to import, and few workers, at few jobs, need them.
        from botocore.auth import S3SigV4QueryAuth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials

        request = AWSRequest(method, self.url(key), headers={"Content-Type": content_type} if content_type else {})
        credentials = Credentials(self.access_key_id, self.secret_access_key)
        S3SigV4QueryAuth(credentials, "s3", self._region, expires_s).add_auth(request)
        return str(request.url)

    @property
    def _region(self) -> str:
        in_host = REGION.search(urlsplit(self.endpoint_url).hostname or "")
        return self.region or (in_host[1] if in_host else DEFAULT_REGION)


def store(
    files: Sequence[File], bucket: Bucket, *, prefix: str, expires_s: int, limits: UploadLimits, stop: Stop
) -> dict[str, str]:
    """Put `files` into the bucket, in a folder of the name `prefix`. Returns for each name a link for a plain GET.

    Raises UploadRefused, UploadFailed, or Stopped.
    """
    effort = web.Effort.begin(limits.timeout_s, limits.attempts, stop)
    links = {}
    for file in files:
        key = "/".join(map(_safe, (prefix, *file.name.split("/"))))
        try:
            url = bucket.signed_url("PUT", key, PUT_EXPIRES_S, file.content_type)
            links[file.name] = bucket.signed_url("GET", key, expires_s)
        except ValueError:  # it names the endpoint
            raise UploadFailed("the bucket's endpoint is no valid URL") from None
        _send(url, file, effort, limits, is_trusted=bucket.is_trusted)
    return links


def put(url: str, file: File, *, limits: UploadLimits, stop: Stop) -> None:
    """Send the file to a URL of the caller's. Raises UploadRefused, UploadFailed, or Stopped."""
    _send(url, file, web.Effort.begin(limits.timeout_s, limits.attempts, stop), limits, is_trusted=False)


def _send(url: str, file: File, effort: web.Effort, limits: UploadLimits, *, is_trusted: bool) -> None:
    place = urlunsplit(urlsplit(without_secrets(url))._replace(path=""))  # some have a token even in their path
    try:
        effort.persist(lambda: _attempt(url, file, effort, is_trusted))
    except web.Refused as refused:
        raise UploadRefused(f"{place}: {refused}") from refused.__cause__
    except web.Failed as failed:
        raise UploadFailed(f"{place}: {failed}") from failed.__cause__
    except web.OutOfTime:
        raise UploadFailed(f"{place}: not stored within {limits.timeout_s:g} s") from None


def _attempt(url: str, file: File, effort: web.Effort, is_trusted: bool) -> None:
    headers = {"Content-Type": file.content_type}
    sent = web.answered("PUT", url, effort, silence_s=SILENCE_S, headers=headers, body=file.data, is_trusted=is_trusted)
    with sent as response:
        status = response.status_code
        if 200 <= status < 300:
            return
        said = f"the server answered HTTP {status}{_reason(response)}"
        if web.may_pass(status):
            raise web.Lost(said)
        raise web.Failed(f"{said}, redirects aren't followed" if 300 <= status < 400 else said)


def _reason(response: requests.Response) -> str:
    """The code in an error of S3, such as NoSuchBucket, if it is among the first bytes. No other text is repeated."""
    try:
        code = re.search(rb"<Code>([A-Za-z]{1,60})</Code>", response.raw.read1(2000))
    except (urllib3.exceptions.HTTPError, OSError):
        return ""
    return f" ({code[1].decode()})" if code else ""


def _safe(name: str) -> str:
    """As a part of a key that no storage, browser or file system reads otherwise."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).strip(".")[:MAX_ID_LENGTH] or "_"
