"""Fakes that users of loraplex need in their own tests."""

from loraplex.testing.fake_engine import FakeEngine, fake_text, fake_token

__all__ = ["FakeEngine", "fake_text", "fake_token"]
