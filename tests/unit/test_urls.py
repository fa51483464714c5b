"""URLs: parsed into parts, and never shown with their secrets."""

from __future__ import annotations

import string
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidUrl
from holdfast.urls import BrokerUrl, is_secret, mask

passwords = st.text(string.ascii_letters + "@:/?#%&=+ é", min_size=3).map(lambda text: f"Q{text}Q")


@given(passwords)
def test_a_password_is_read_back_and_never_shown(password: str) -> None:
    """Escaped special characters survive parsing, and neither form is printed."""
    escaped = quote(password, safe="")
    url = BrokerUrl.parse(f"amqp://guest:{escaped}@localhost:5672/shop")
    assert (url.username, url.password, url.hosts) == ("guest", password, ("localhost:5672",))
    for shown in (str(url), repr(url)):
        assert escaped not in shown
        assert password not in shown


@pytest.mark.parametrize("password", ["p@ss", "p/ss", "p:ss", "p?ss#", "12@3", "päss@@"])
def test_even_an_unescaped_password_is_masked(password: str) -> None:
    """A mistyped URL appears in an error before it is corrected."""
    assert mask(f"cannot reach amqp://guest:{password}@host:5672/v now") == (
        "cannot reach amqp://guest:***@host:5672/v now"
    )


@pytest.mark.parametrize(
    ("shown", "masked"),
    [
        ("redis://:hunter2@host:6379/0", "redis://:***@host:6379/0"),
        ("nats://s3cr3t@host:4222", "nats://***@host:4222"),
        ("kafka://h?sasl.password=a;b&acks=all", "kafka://h?sasl.password=***&acks=all"),
        ("kafka://h?sasl_plain_password=x", "kafka://h?sasl_plain_password=***"),
        (
            "sqs://q?aws-secret-access-key=x&region=eu",
            "sqs://q?aws-secret-access-key=***&region=eu",
        ),
        ("x://h?api_token=a%26b", "x://h?api_token=***"),
        ("a://u:p@h b://v:q@i", "a://u:***@h b://v:***@i"),
    ],
)
def test_secrets_are_masked_wherever_they_stand(shown: str, masked: str) -> None:
    """User info and query settings hide, the rest stays readable."""
    assert mask(shown) == masked


@pytest.mark.parametrize(
    "plain",
    [
        "kafka://a:9092,b:9092/orders?acks=all",
        "redis://host:6379/0?mail=a@b",
        "postgresql://app@host/db",
        "sqlite:///tmp@home/file.db",
        "memory:",
        "no url at all",
    ],
)
def test_what_holds_no_secret_is_left_alone(plain: str) -> None:
    """Masking does not hide hosts, ports or users."""
    assert mask(plain) == plain


def test_a_url_is_parsed_into_its_parts() -> None:
    """Several hosts, a path and options each have their place."""
    url = BrokerUrl.parse("KAFKA://u%40x:p@a:9092,[::1]:9093/some%20topic?acks=all&empty=")
    assert (url.scheme, url.hosts) == ("kafka", ("a:9092", "[::1]:9093"))
    assert (url.username, url.password) == ("u@x", "p")
    assert (url.path, url.options) == ("/some topic", {"acks": "all", "empty": ""})


def test_a_url_needs_no_host() -> None:
    """Embedded brokers are named by scheme and path alone."""
    assert BrokerUrl.parse("memory:").hosts == ()
    assert BrokerUrl.parse("sqlite:///file.db").path == "/file.db"


@pytest.mark.parametrize(
    "url", ["", "localhost", "://host", "kafka://[::1", "kafka://host:port", "a://u:p/q@host", None]
)
def test_a_malformed_url_is_refused_with_the_right_form(url: str) -> None:
    """The error shows how a URL is written."""
    with pytest.raises(InvalidUrl, match=r"scheme|Invalid IPv6"):
        BrokerUrl.parse(url)


def test_the_error_does_not_show_the_password() -> None:
    """An unescaped slash makes the password look like a port, and it stays hidden."""
    with pytest.raises(InvalidUrl, match="percent-encode") as caught:
        BrokerUrl.parse("amqp://guest:hunter/2@host")
    assert "hunter" not in str(caught.value)


@pytest.mark.parametrize("name", ["password", "SASL_PLAIN_USERNAME", "apiKey", "auth_token"])
def test_secret_settings_are_known_by_name(name: str) -> None:
    """Whatever prints settings asks here first."""
    assert is_secret(name)
    assert not is_secret("bootstrap_servers")
