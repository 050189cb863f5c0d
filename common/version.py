"""The version of Baton: of the package that pip installs, of the API, and of every command."""

VERSION = "0.1.0"
