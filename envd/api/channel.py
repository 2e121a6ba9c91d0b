"""How envd's own commands and clients dial a daemon, apart from the service: who only dials need not import it."""

#: In one message, either way.
MAX_MESSAGE_BYTES = 64 << 20

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # We dial loopback: a proxy that is set for other traffic must not see it.
    ("grpc.enable_http_proxy", 0),
)
