"""Attacks that look for a way out: doors of the kernel, files of the host, others' processes, the network."""

from __future__ import annotations

import asyncio
import socket

from benchmarks.sandbox_attack_kit import Scene, Table, check

TABLE = Table("escape")

_REFUSED = """
import ctypes, errno, os, socket
libc, got = ctypes.CDLL(None, use_errno=True), []
def refused(name, number, *args):
    ctypes.set_errno(0)
    if libc.syscall(number, *args) >= 0 or ctypes.get_errno() not in (%s):
        got.append((name, ctypes.get_errno()))
%s
print(got)
"""
_NEVER = "errno.EPERM, errno.ENOSYS, errno.EAFNOSUPPORT, errno.EACCES"


async def refused(scene: Scene, calls: str, errors: str = _NEVER) -> None:
    """Makes system calls, each of which must be refused."""
    await scene.says(_REFUSED % (errors, calls), b"[]")


@TABLE.attack("namespaces, mounts and tracing", case=29, needs="!own_kernel")
async def doors(scene: Scene) -> None:
    """unshare, clone, setns, mount, chroot, ptrace, process_vm_readv, kcmp, pidfd_getfd.

    -> EPERM or ENOSYS.
    """
    await refused(
        scene,
        """
NEW = 0x10000000
refused('unshare', 272, NEW)
for flag in (0x20000, 0x40000000, 0x20000000, 0x08000000, 0x04000000, 0x02000000):
    refused('unshare %x' % flag, 272, flag)
refused('clone', 56, NEW | 17, 0, 0, 0, 0)
refused('clone3', 435, bytes(88), 88)
refused('setns', 308, os.open('/proc/self/ns/mnt', 0), 0)
refused('mount', 165, b'none', b'/tmp', b'tmpfs', 0, 0)
refused('umount', 166, b'/tmp', 2)
refused('pivot_root', 155, b'/tmp', b'/tmp')
refused('chroot', 161, b'/')
refused('ptrace', 101, 16, os.getppid(), 0, 0)
refused('ptrace self', 101, 0, 0, 0, 0)
refused('process_vm_readv', 310, 1, 0, 0, 0, 0, 0)
refused('process_vm_writev', 311, 1, 0, 0, 0, 0, 0)
refused('kcmp', 312, os.getpid(), 1, 0, 0, 0)
refused('pidfd_getfd', 438, os.pidfd_open(os.getpid()), 0, 0)
refused('open_by_handle_at', 304, -100, 0, 0)
refused('fsopen', 430, b'tmpfs', 0)
refused('fsconfig', 431, 0, 0, 0, 0, 0)
refused('fspick', 433, -100, b'/tmp', 0)
refused('open_tree', 428, -100, b'/', 1)
refused('move_mount', 429, 0, 0, 0, 0, 0)
refused('mount_setattr', 442, -100, b'/', 0, 0, 0)
refused('mknod', 133, b'/workspace/dev', 0o60666, 0x801)
refused('setuid', 105, 0)
refused('setgid', 106, 0)
refused('setgroups', 116, 1, bytes(4))
refused('chown', 92, b'/workspace', 0, 0)
""",
    )


@TABLE.attack("rarely used doors of the kernel", case=29)
async def rare(scene: Scene) -> None:
    """keyctl, bpf, userfaultfd, perf, io_uring, aio, kexec, modules, quota, swap, reboot.

    -> EPERM or ENOSYS.
    """
    await refused(
        scene,
        """
refused('keyctl', 250, 0, -3, 0)
refused('add_key', 248, b'user', b'a', b'b', 1, -3)
refused('request_key', 249, b'user', b'a', 0, -3)
refused('bpf', 321, 0, bytes(64), 64)
refused('userfaultfd', 323, 1)
refused('perf_event_open', 298, bytes(128), 0, -1, -1, 0)
refused('io_uring_setup', 425, 1, bytes(128))
refused('io_uring_enter', 426, 0, 0, 0, 0, 0, 0)
refused('io_setup', 206, 1, bytes(8))
refused('kexec_load', 246, 0, 0, 0, 0)
refused('kexec_file_load', 320, 0, 0, 0, 0, 0)
refused('init_module', 175, 0, 0, b'')
refused('finit_module', 313, 0, b'', 0)
refused('delete_module', 176, b'x', 0)
refused('swapon', 167, b'/tmp/x', 0)
refused('swapoff', 168, b'/tmp/x')
refused('reboot', 169, 0xfee1dead, 672274793, 0x89abcdef, 0)
refused('acct', 163, 0)
refused('quotactl', 179, 0x80000100, 0, 0, 0)
refused('quotactl_fd', 443, 0, 0, 0, 0)
refused('syslog', 103, 3, bytes(100), 100)
refused('sethostname', 170, b'x', 1)
refused('setdomainname', 171, b'x', 1)
refused('iopl', 172, 3)
refused('ioperm', 173, 0, 1, 1)
refused('memfd_secret', 447, 0)
refused('lookup_dcookie', 212, 0, 0, 0)
refused('fanotify_init', 300, 0, 0)
""",
    )


@TABLE.attack("calls of another architecture")
async def foreign(scene: Scene) -> None:
    """The x32 numbers and the 32-bit gate of forbidden calls -> ENOSYS or the end of the process."""
    await refused(
        scene,
        """
refused('x32 ptrace', 0x40000000 | 521, 0, 0, 0, 0)
refused('x32 unshare', 0x40000000 | 272, 0x10000000)
refused('x32 mount', 0x40000000 | 165, b'none', b'/tmp', b'tmpfs', 0, 0)
""",
    )
    code = "b8 36 01 00 00 bb 00 00 00 10 cd 80 c3"  # mov eax, 310 (unshare); mov ebx, NEWUSER; int 0x80; ret
    result = await scene.python(f"""
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=7)
page.write(bytes.fromhex({code!r}))
call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
print('could' if call() == 0 else 'refused')
""")
    check(b"could" not in result.stdout, "a namespace was made through the 32-bit gate")


@TABLE.attack("sockets of rare families")
async def families(scene: Scene) -> None:
    """Vsock to the hypervisor, packets, crypto, raw, audit and kernel events -> no such socket."""
    await scene.says(
        """
import socket
got = []
for name, family, kind, protocol in (
    ('vsock', 40, 1, 0), ('vsock dgram', 40, 2, 0), ('packet', 17, 3, 3), ('packet dgram', 17, 2, 0),
    ('alg', 38, 5, 0), ('bluetooth', 31, 3, 1), ('can', 29, 3, 1), ('tipc', 30, 1, 0), ('rds', 21, 5, 0),
    ('key', 15, 3, 2), ('xdp', 44, 3, 0), ('kcm', 41, 5, 0), ('smc', 43, 1, 0), ('qipcrtr', 42, 2, 0),
    ('raw', 2, 3, 1), ('raw6', 10, 3, 58), ('appletalk', 5, 2, 0), ('x25', 9, 5, 0), ('llc', 26, 1, 0),
    ('uevents', 16, 3, 15), ('audit', 16, 3, 9), ('connector', 16, 3, 11), ('netfilter', 16, 3, 12),
    ('xfrm', 16, 3, 6), ('crypto', 16, 3, 21), ('generic', 16, 3, 16),
):
    try: socket.socket(family, kind, protocol).close(); got.append(name)
    except OSError: pass
print(got)
""",
        b"[]",
    )


@TABLE.attack("no power in commands", case=29)
async def powers(scene: Scene) -> None:
    """Reads what a command and a call may -> no capability, no new privileges, a filter, not root."""
    looks = [await scene.box.exec(["cat", "/proc/self/status"])]
    looks.append(await scene.box.python("print(open('/proc/self/status').read())"))
    for look in looks:
        lines = look.stdout.decode().splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        check(status["Uid"].split()[0] != "0" and len(set(status["Uid"].split())) == 1, "it is root")
        groups = {int(group) for group in status["Groups"].split()} - {int(status["Gid"].split()[0])}
        check(all(group >= 1 << 20 for group in groups), f"it has the groups {groups}")
        names = ("CapEff", "CapPrm", "CapInh", "CapAmb")  # an old gVisor has no ambient set
        have = {name: int(status.get(name, "0"), 16) for name in names}
        check(not any(have.values()), f"it has capabilities {have}")
        check(status["Seccomp"] == "2", "it has no filter")
    asked = "import ctypes; print(ctypes.CDLL(None).prctl(39, 0, 0, 0, 0))"  # PR_GET_NO_NEW_PRIVS
    for told in (await scene.python(asked), await scene.box.python(asked)):
        check(told.stdout == b"1\n", f"it can get new privileges: {told}")


@TABLE.attack("set-user-id programs")
async def suid(scene: Scene) -> None:
    """Runs every set-user-id program of the system -> none of them makes it another user."""
    result = await scene.box.exec(
        "cp /usr/bin/cat /workspace/c; chmod 6777 /workspace/c; /workspace/c /proc/self/status | grep ^Uid; "
        "su -c id; sudo -n id; mount; for f in $(find / -xdev -perm /6000 -type f 2>/dev/null); do "
        "timeout 1 $f < /dev/null 2>&1 | head -c 100; done; id -u",
        timeout_s=30,
    )
    check(b"uid=0" not in result.stdout and not result.stdout.endswith(b"\n0\n"), "it became root")


@TABLE.attack("sockets and files of the host's services", case=28, needs="!own_kernel")
async def services(scene: Scene) -> None:
    """docker.sock, containerd.sock, the node's socket, ssh, shadow, disks -> not there."""
    paths = (
        "/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock", "/root",
        "/root/.ssh/id", "/etc/shadow", "/etc/sudoers", "/dev/sda", "/dev/vda", "/dev/mem", "/dev/kmem",
        "/dev/port", "/dev/kvm",
        "/dev/vsock", "/dev/fuse", "/dev/loop0", "/dev/loop-control", "/dev/mapper/control", "/dev/net/tun",
        "/dev/kmsg", "/dev/console", "/dev/tty0", "/dev/uinput", "/dev/userfaultfd", "/dev/dri/card0",
        str(scene.stage.folder / "node.sock"), str(scene.stage.folder),
        "/proc/1/root/etc/shadow", "/proc/1/cwd/x",
    )  # fmt: skip
    await scene.says(
        f"""
import os
got = []
for path in {paths!r}:
    try:
        os.listdir(path) if os.path.isdir(path) else os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        got.append(path)
    except OSError: pass
print(got)
""",
        b"[]",
    )


@TABLE.attack("switches of the kernel", case=28)
async def switches(scene: Scene) -> None:
    """release_agent, core_pattern, sysrq, modprobe, binfmt, uevent_helper, oom, every writable file.

    -> denied.
    """
    await scene.says(
        """
import os
got = []
for path in ('/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/proc/sys/kernel/modprobe',
    '/sys/fs/cgroup/memory/release_agent', '/sys/fs/cgroup/memory/notify_on_release',
    '/sys/kernel/uevent_helper',
    '/sys/fs/cgroup/cgroup.procs', '/sys/fs/cgroup/memory/memory.limit_in_bytes',
    '/sys/fs/cgroup/pids/pids.max',
    '/sys/fs/cgroup/memory.max', '/proc/sys/vm/panic_on_oom', '/proc/sys/fs/binfmt_misc/register',
    '/proc/sys/kernel/ns_last_pid', '/proc/1/oom_score_adj', '/proc/1/mem', '/proc/bus/pci', '/proc/irq/0/x',
    '/proc/mtrr', '/proc/acpi/wakeup'):
    try: os.write(os.open(path, os.O_WRONLY), b'1'); got.append(path)
    except OSError: pass
for top in ('/proc/sys', '/sys', '/proc/fs', '/proc/irq', '/proc/bus', '/proc/scsi', '/proc/driver'):
    for root, _, names in os.walk(top):
        for name in set(names) - {'ns_last_pid'}:  # anybody opens it, and nobody without power writes it
            path = root + '/' + name
            try: os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK)); got.append(path)
            except OSError: pass
print(got)
""",
        b"[]",
        30,
    )


@TABLE.attack("memory and names of the kernel", case=30)
async def kernel_memory(scene: Scene) -> None:
    """kcore, kallsyms, kpage*, kmsg, firmware, iomem, slabinfo, timer_list, keys -> denied or empty."""
    await scene.says(
        """
import os
got = []
for path in ('/proc/kcore', '/proc/kmsg', '/proc/kpagecgroup', '/proc/kpagecount', '/proc/kpageflags',
    '/sys/firmware', '/proc/keys', '/proc/timer_list', '/proc/slabinfo', '/proc/vmallocinfo',
    '/proc/sched_debug',
    '/proc/latency_stats', '/proc/pagetypeinfo', '/proc/allocinfo', '/proc/acpi', '/proc/scsi',
    '/sys/kernel/debug',
    '/proc/1/mem', '/proc/1/stack', '/proc/1/syscall', '/sys/kernel/security'):
    try:
        if os.path.isdir(path):
            if os.listdir(path): got.append(path)
        elif os.read(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 16): got.append(path)
    except OSError: pass
for path in ('/proc/kallsyms', '/proc/iomem', '/proc/modules'):
    try: words = open(path).read().replace('-', ' ').split()
    except OSError: continue
    addresses = {word for word in words if len(word) > 15}
    if any(set(word) - {'0', 'x'} and all(c in '0123456789abcdefx' for c in word) for word in addresses):
        got.append(path)
print(got)
""",
        b"[]",
    )


@TABLE.attack("grep from the root", case=30)
async def grep(scene: Scene) -> None:
    """`grep -r x /` over proc, sys and dev -> ends or is ended, the host and the sandbox go on."""
    result = await scene.box.exec(
        "grep -rs x /proc /sys /dev > /dev/null; grep -rs x /etc /run | wc", timeout_s=5
    )
    check(result.exit_code is not None or result.timed_out, "it ended otherwise")
    await scene.answers()


@TABLE.attack("processes of others")
async def others(scene: Scene) -> None:
    """Looks for processes that are not its own, their memory, channels and signals.

    -> only the agent's, and shut.
    """
    mark = "4003.5"
    await scene.sibling.start(["sleep", mark])
    await scene.says(
        f"""
import os
got = []
for pid in os.listdir('/proc'):
    if not pid.isdigit() or int(pid) == os.getpid(): continue
    try: line = open('/proc/' + pid + '/cmdline').read()
    except OSError: continue
    if {mark!r} in line.split(chr(0)): got.append('sibling')
    if 'dockerd' in line or 'sandbox_attack_node' in line: got.append(line)
    if os.stat('/proc/' + pid).st_uid != os.getuid():
        names = ['mem', 'cwd/x', 'root/x']
        try: names += ['fd/' + fd for fd in os.listdir('/proc/' + pid + '/fd')]
        except OSError: pass
        for name in names:
            path = '/proc/' + pid + '/' + name
            for mode in (os.O_RDONLY, os.O_WRONLY):
                try: os.open(path, mode | os.O_NONBLOCK)
                except OSError: continue
                if not name.startswith('fd/') or os.readlink(path) != '/dev/null': got.append(path)
        try: got += [pid + ' environ'] if 'TEMPER' in open('/proc/' + pid + '/environ').read() else []
        except OSError: pass
        try: os.kill(int(pid), 0); got.append('signal ' + pid)
        except OSError: pass
print(got)
""",
        b"[]",
    )


@TABLE.attack("secrets of other calls")
async def memory_of_calls(scene: Scene) -> None:
    """A call looks for another's input in all that it can read -> finds nothing of it."""
    secret = b"canary-" + b"a81e"
    other = asyncio.create_task(scene.box.exec("sleep 1; cat", stdin=secret * 100))
    await scene.box.exec(["cat"], stdin=secret)
    result = await scene.box.python("""
import re
word, found = b'cana' + b'ry-a8' + b'1e', 0
for line in open('/proc/self/maps'):
    low, high, mode = re.match(r'(\\w+)-(\\w+) (\\S+)', line).groups()
    if mode.startswith('rw') and '[v' not in line:
        with open('/proc/self/mem', 'rb') as memory:
            memory.seek(int(low, 16)); found += memory.read(int(high, 16) - int(low, 16)).count(word)
print(found <= 2)
""")
    check(result.stdout == b"True\n", f"it found something: {result}")
    check((await other).stdout == secret * 100, "the other's input was touched")


@TABLE.attack("descriptors of the agent")
async def descriptors(scene: Scene) -> None:
    """Lists what a command, a call and a session hold open -> nothing but their own."""
    line = "ls /proc/self/fd | tr '\\n' ' '"
    check((await scene.box.exec(line)).stdout == b"0 1 2 3 ", "a command holds more")
    inner = await scene.box.python("import os; print(os.listdir('/proc/self/fd'))")
    check(inner.stdout == b"['0', '1', '2', '3']\n", f"a call holds {inner.stdout!r}")


@TABLE.attack("terminal input forged")
async def tiocsti(scene: Scene) -> None:
    """TIOCSTI and TIOCLINUX on its terminal, also with high bits set -> refused."""
    process = await scene.box.start(
        ["/usr/bin/python3", "-c", """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
ok = [name for name, number in (('sti', 0x5412), ('linux', 0x541C), ('high', (1 << 32) | 0x5412))
      if libc.syscall(16, ctypes.c_ulong(0), ctypes.c_ulong(number), b'x') == 0]
print('did', ok)
"""], terminal=(24, 80),
    )  # fmt: skip
    said = (await process.wait(10)).stdout
    check(b"did []" in said, f"it could: {said!r}")


@TABLE.attack("network of nothing", case=34)
async def network(scene: Scene) -> None:
    """TCP, UDP, ICMP, IPv6 and names, to the host's listener, gateways and metadata -> nothing is reached."""
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        listener.listen()
        port = listener.getsockname()[1]
        mine = {address[4][0] for address in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
        hosts = sorted({"127.0.0.1", "172.17.0.1", "10.0.2.2", "192.168.0.1", "169.254.169.254", *mine})
        await scene.says(
            f"""
import socket
got = []
for host in {hosts!r}:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_INET, kind) as s:
            s.settimeout(0.3)
            try:
                s.connect((host, {port}))
                if kind == socket.SOCK_STREAM or host != '127.0.0.1': got.append((host, kind.name))
            except OSError: pass
for address in ('::2', 'fe80::1', '::ffff:172.17.0.1', '2001:4860:4860::8888'):
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as s:
        s.settimeout(0.3)
        try: s.connect((address, {port})); got.append(address)
        except OSError: pass
for name in ('localhost.localdomain.test', 'example.com', 'metadata.google.internal'):
    try: got.append(socket.gethostbyname(name))
    except OSError: pass
try:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM, 1).sendto(bytes(8), ('172.17.0.1', 0))
    got.append('icmp')
except OSError: pass
routes = [line for line in open('/proc/net/route')][1:]
print(got + routes)
""",
            b"[]",
            20,
        )


@TABLE.attack("abstract and unix sockets", case=34)
async def abstract(scene: Scene) -> None:
    """Looks for abstract sockets of the host and of a sibling, and has one of its own.

    -> sees only its own.
    """
    name = "tempering-attack"
    with socket.socket(socket.AF_UNIX) as host:
        host.bind(f"\0{name}-host")
        host.listen()
        serve = (
            "import socket, time\ns = socket.socket(socket.AF_UNIX)\n"
            f"s.bind('\\0{name}-sibling'); s.listen(); time.sleep(8)"
        )
        await scene.sibling.start(["/usr/bin/python3", "-c", serve])
        await asyncio.sleep(0.3)
        await scene.says(
            f"""
import socket
got = []
for end in ('host', 'sibling'):
    try: socket.socket(socket.AF_UNIX).connect('\\0{name}-' + end); got.append(end)
    except OSError: pass
got += [line for line in open('/proc/net/unix') if '{name}' in line]
print(got)
""",
            b"[]",
        )


@TABLE.attack("identity of the machine", case=33)
async def identity(scene: Scene) -> None:
    """Host name, machine id and addresses of a sandbox and its sibling.

    -> a name for all, no id of the host.
    """
    ids = "/etc/machine-id /var/lib/dbus/machine-id /sys/class/dmi/id/product_uuid"
    look = f"cat /proc/sys/kernel/hostname; cat {ids} 2>/dev/null; true"
    mine, other = [(await box.exec(look)).stdout for box in (scene.box, scene.sibling)]
    check(mine == other == b"sandbox\n", f"it says {mine!r}, its sibling {other!r}")
    check(socket.gethostname().encode() not in mine, "it has the host's name")
