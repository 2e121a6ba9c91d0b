"""A seccomp filter for untrusted code, assembled here. Linux on x86-64 and arm64, standard library only.

It is a deny list that is closed at the end: calls that can reach beyond the sandbox or use memory outside its limits
fail with EPERM, and calls newer than the list fail with ENOSYS, so a newer kernel adds nothing. An allow list would
have to follow the calls of every library that OSWorld's evaluators load; one missing call would cost scores.
"""

import ctypes
import errno
import platform
import struct

#: Numbers of the denied system calls on x86-64 and on arm64 (-1: does not exist there).
_DENIED = {
    # Namespaces, mounts and file systems.
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265), "fanotify_init": (300, 262), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89),
    # Other processes.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "process_mrelease": (448, 448),
    "migrate_pages": (256, 238), "move_pages": (279, 239),
    # Parts of the kernel with many vulnerabilities, which evaluators do not need.
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "bpf": (321, 280),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "userfaultfd": (323, 282),
    "perf_event_open": (298, 241), "vmsplice": (278, 75), "io_setup": (206, 0), "personality": (135, 92),
    "modify_ldt": (154, -1), "uselib": (134, -1), "lookup_dcookie": (212, 18),
    # The machine.
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "syslog": (103, 116), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171), "sethostname": (170, 161),
    "setdomainname": (171, 162), "iopl": (172, -1), "ioperm": (173, -1), "vhangup": (153, 58),
    # Memory that no resource limit counts.
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "semget": (64, 190),
    "msgget": (68, 186), "mq_open": (240, 180),
}  # fmt: skip
#: The first number that was not reviewed. Also above it: the x32 calls of x86-64, which have bit 30 set.
_FIRST_UNKNOWN = 451

_CLONE3 = 435
#: The flags of clone(2) that create namespaces: mount, cgroup, UTS, IPC, user, process, network.
_CLONE_NEW = 0x7E020000
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_GROWSDOWN, _MAP_HUGETLB = 0x01, 0x20, 0x100, 0x40000
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
_SOCK_TYPE, _SOCK_STREAM, _SOCK_DGRAM, _SOCK_SEQPACKET = 0xF, 1, 2, 5
_IPPROTO_TCP, _IPPROTO_UDP = 6, 17

#: By `platform.machine()`: the column above, AUDIT_ARCH, and the numbers of clone, mmap and socket.
_MACHINES = {"x86_64": (0, 0xC000003E, 56, 9, 41), "aarch64": (1, 0xC00000B7, 220, 222, 198)}

#: Instructions of linux/bpf_common.h on the 32-bit accumulator.
_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT = 0x15, 0x35, 0x45
#: Offsets in struct seccomp_data; of arguments, the low half on a little-endian machine.
_NUMBER, _ARCHITECTURE, _ARGUMENT_0, _ARGUMENT_SIZE = 0, 4, 16, 8
_ALLOW, _KILL_PROCESS = 0x7FFF0000, 0x80000000
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2

_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    """The sock_fprog of linux/filter.h."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def install(*, has_sockets: bool = True) -> None:
    """Filter this process and its future children for good. Needs `no_new_privs` or CAP_SYS_ADMIN.

    Raises:
        OSError: The kernel refused it, or the machine type is not supported.
    """
    code = program(platform.machine(), has_sockets=has_sockets)
    loaded = _Program(len(code) // 8, code)
    if _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(loaded), 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp failed: {errno.errorcode.get(number, number)}")


def program(machine: str, *, has_sockets: bool = True) -> bytes:
    """Return the filter for a machine type, 8 bytes per instruction. Raises: OSError: The type is not supported."""
    if machine not in _MACHINES:
        raise OSError(errno.ENOSYS, f"machine type {machine} is not supported")
    column, architecture, clone, mmap, socket = _MACHINES[machine]
    code = [
        _load(_ARCHITECTURE),
        *_unless(architecture, _return(_KILL_PROCESS)),
        _load(_NUMBER),
        *_when(_IF_AT_LEAST, _FIRST_UNKNOWN, _fail(errno.ENOSYS)),
        # glibc then uses clone, whose flags a filter can read.
        *_when(_IF_EQUAL, _CLONE3, _fail(errno.ENOSYS)),
    ]
    for numbers in _DENIED.values():
        if numbers[column] >= 0:
            code += _when(_IF_EQUAL, numbers[column], _fail(errno.EPERM))
    code += _call(clone, [_load_argument(0), *_when(_IF_ANY_BIT, _CLONE_NEW, _fail(errno.EPERM))])
    code += _call(mmap, _mmap_rules())
    code += _call(socket, _socket_rules() if has_sockets else [_fail(errno.EPERM)])
    return b"".join([*code, _return(_ALLOW)])


def _mmap_rules() -> list[bytes]:
    """Refuse mappings that RLIMIT_DATA does not count: shared anonymous, downward-growing and huge-page memory."""
    shared = _MAP_SHARED | _MAP_ANONYMOUS
    return [
        _load_argument(3),
        *_when(_IF_ANY_BIT, _MAP_GROWSDOWN | _MAP_HUGETLB, _fail(errno.EPERM)),
        _instruction(_AND, shared),
        *_when(_IF_EQUAL, shared, _fail(errno.EPERM)),
    ]


def _socket_rules() -> list[bytes]:
    """Allow Unix sockets, and TCP and UDP over IPv4 and IPv6; refuse raw, netlink, vsock and all other sockets."""
    return [
        _load_argument(0),
        *_unless_any((_AF_UNIX, _AF_INET, _AF_INET6), _fail(errno.EPERM)),
        _load_argument(1),
        _instruction(_AND, _SOCK_TYPE),
        *_unless_any((_SOCK_STREAM, _SOCK_DGRAM, _SOCK_SEQPACKET), _fail(errno.EPERM)),
        _load_argument(2),
        *_unless_any((0, _AF_UNIX, _IPPROTO_TCP, _IPPROTO_UDP), _fail(errno.EPERM)),
    ]


def _call(number: int, rules: list[bytes]) -> list[bytes]:
    """Apply rules to one system call, and allow it if none refuses it."""
    body = [*rules, _return(_ALLOW)]
    return [_instruction(_IF_EQUAL, number, 0, len(body)), *body]


def _when(condition: int, value: int, action: bytes) -> list[bytes]:
    return [_instruction(condition, value, 0, 1), action]


def _unless(value: int, action: bytes) -> list[bytes]:
    return [_instruction(_IF_EQUAL, value, 1, 0), action]


def _unless_any(values: tuple[int, ...], action: bytes) -> list[bytes]:
    """Apply an action unless the accumulator is one of the values. A jump counts the instructions that it skips."""
    tests = [_instruction(_IF_EQUAL, value, len(values) - index, 0) for index, value in enumerate(values)]
    return [*tests, action]


def _load(offset: int) -> bytes:
    return _instruction(_LOAD, offset)


def _load_argument(index: int) -> bytes:
    return _load(_ARGUMENT_0 + index * _ARGUMENT_SIZE)


def _fail(number: int) -> bytes:
    return _return(0x00050000 | number)  # SECCOMP_RET_ERRNO


def _return(value: int) -> bytes:
    return _instruction(_RETURN, value)


def _instruction(code: int, value: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, jump_true, jump_false, value)
