"""KV pages from prefill memory to decode memory: one transfer's two ends, and the transports that move the bytes.

In SGLang's words, ``send.sender.Sender`` and ``receive.receiver.Receiver`` are the ``KVManager`` of a prefill node and
of a decode node, ``send.session.SendSession`` and ``receive.session.ReceiveSession`` are the ``KVSender`` and the
``KVReceiver`` of one request, and a transport is a backend, as NIXL or Mooncake are. There is no bootstrap server: a
decode node offers its pool to a prefill node itself, with ``Connect`` over the control plane.
"""
