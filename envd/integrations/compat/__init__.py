"""Wire protocols of other systems, served next to gRPC, so that their unmodified clients run on envd's desktops."""
