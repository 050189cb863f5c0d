"""Requests on their way: input, admission, queue, dispatch, output."""
