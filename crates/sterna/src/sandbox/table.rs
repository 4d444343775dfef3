//! The table. `cargo test -p sterna --test sandbox calls::` runs every feature under exactly these rules, and fails if a line
//! is missing or unused.

use sterna_ram::threads::ThreadRole;

use super::types::Argument::Any;
use super::types::Thread::{DestinationCaller, SourceCaller};
use super::types::{Argument, Feature, Syscall, Thread, When};

const MIGRATION: Thread = Thread::Engine(ThreadRole::Migration);
const LANE: Thread = Thread::Engine(ThreadRole::Lane);
const CONNECT: Thread = Thread::Engine(ThreadRole::Connect);
const INCOMING: Thread = Thread::Engine(ThreadRole::Incoming);
const LISTENER: Thread = Thread::Engine(ThreadRole::Listener);
const GREETER: Thread = Thread::Engine(ThreadRole::Greeter);
const LOADER: Thread = Thread::Engine(ThreadRole::Loader);
const FAULTS: Thread = Thread::Engine(ThreadRole::PageFaults);
const CONFIGURE: Thread = Thread::Engine(ThreadRole::Configure);
const LIVE_SAVE: Thread = Thread::Engine(ThreadRole::LiveSave);
const HELD_WRITES: Thread = Thread::Engine(ThreadRole::HeldWrites);
const CHECKPOINT_COPIER: Thread = Thread::Engine(ThreadRole::CheckpointCopier);
const SERVE_FAULTS: Thread = Thread::Engine(ThreadRole::ServeFaults);
const READER: Thread = Thread::Engine(ThreadRole::Reader);
const FILL: Thread = Thread::Engine(ThreadRole::Fill);
const STANDBY: Thread = Thread::Engine(ThreadRole::Standby);

/// Memory that a program may execute is never mapped.
const NOT_EXECUTABLE: Argument = Argument::Lacks { index: 2, bits: 4, name: "PROT_EXEC" };
/// Files are opened for reading, and none is created.
const READ_ONLY: Argument = Argument::Lacks { index: 2, bits: 0o103, name: "O_WRONLY | O_RDWR | O_CREAT" };

const fn is(index: u8, value: u32, name: &'static str) -> Argument {
    Argument::Is { index, value, name }
}

macro_rules! table {
    ($($feature:ident { $($name:ident $number:ident, $argument:expr, [$($thread:expr),*], $when:ident;)* })*) => {
        /// All calls, in groups by their feature. Groups and lines are sorted by name.
        pub const TABLE: &[Syscall] = &[$($(Syscall {
            name: stringify!($name),
            number: libc::$number,
            argument: $argument,
            threads: &[$($thread),*],
            when: When::$when,
            feature: Feature::$feature,
        },)*)*];
    };
}

table! {
    Runtime {
        brk SYS_brk, Any, [], Any;
        clock_nanosleep SYS_clock_nanosleep, Any, [], Any;
        clone3 SYS_clone3, Any, [], Any;
        close SYS_close, Any, [], Any;
        exit SYS_exit, Any, [], Any;
        fcntl SYS_fcntl, is(1, 1, "F_GETFD"), [], Any;
        futex SYS_futex, Any, [], Any;
        getrandom SYS_getrandom, Any, [], Any;
        gettid SYS_gettid, Any, [], Any;
        madvise SYS_madvise, is(2, 4, "MADV_DONTNEED"), [], Any;
        mmap SYS_mmap, NOT_EXECUTABLE, [], Any;
        mprotect SYS_mprotect, NOT_EXECUTABLE, [], Any;
        mremap SYS_mremap, Any, [], Any;
        munmap SYS_munmap, Any, [], Any;
        openat SYS_openat, READ_ONLY, [], Any;
        prctl SYS_prctl, is(0, 15, "PR_SET_NAME"), [], Any;
        read SYS_read, Any, [], Any;
        // The kernel continues a wait with a time limit by this call, after SIGSTOP, a debugger or the host's suspend.
        restart_syscall SYS_restart_syscall, Any, [], Any;
        rseq SYS_rseq, Any, [], Any;
        rt_sigprocmask SYS_rt_sigprocmask, Any, [], Any;
        sched_getaffinity SYS_sched_getaffinity, Any, [], Any;
        sched_yield SYS_sched_yield, Any, [], Any;
        set_robust_list SYS_set_robust_list, Any, [], Any;
        sigaltstack SYS_sigaltstack, Any, [], Any;
    }
    Always {
        fallocate SYS_fallocate, is(1, 3, "FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE"), [INCOMING], End;
        lseek SYS_lseek, is(2, 3, "SEEK_DATA"), [LANE, LIVE_SAVE, LOADER], Pages;
        lseek SYS_lseek, is(2, 4, "SEEK_HOLE"), [LANE, LIVE_SAVE], Pages;
        madvise SYS_madvise, is(2, 0x17, "MADV_POPULATE_WRITE"), [LOADER], Pages;
        statx SYS_statx, Any, [CONFIGURE, DestinationCaller, LANE, LIVE_SAVE, LOADER], Any;
    }
    PrivateMemory {
        ioctl SYS_ioctl, is(1, 0xc0606610, "PAGEMAP_SCAN"), [LANE, LIVE_SAVE, LOADER, MIGRATION], Pages;
    }
    HugePages {
        madvise SYS_madvise, is(2, 0x16, "MADV_POPULATE_READ"), [LANE, LOADER], Pages;
    }
    Sockets {
        accept4 SYS_accept4, Any, [LISTENER], Begin;
        bind SYS_bind, Any, [DestinationCaller], Begin;
        connect SYS_connect, Any, [LIVE_SAVE, MIGRATION], Begin;
        eventfd2 SYS_eventfd2, Any, [], Begin;
        getpeername SYS_getpeername, Any, [LISTENER, LIVE_SAVE, MIGRATION], Begin;
        getsockopt SYS_getsockopt, Any, [], Any;
        ioctl SYS_ioctl, is(1, 0x5411, "TIOCOUTQ"), [MIGRATION], Pages;
        ioctl SYS_ioctl, is(1, 0x5421, "FIONBIO"), [LISTENER, LIVE_SAVE, MIGRATION], Begin;
        ioctl SYS_ioctl, is(1, 0x894b, "SIOCOUTQNSD"), [MIGRATION], Pages;
        listen SYS_listen, Any, [DestinationCaller], Begin;
        ppoll SYS_ppoll, Any, [], Any;
        recvmsg SYS_recvmsg, Any, [], Any;
        sendmsg SYS_sendmsg, Any, [], Any;
        setsockopt SYS_setsockopt, Any, [], Any;
        shutdown SYS_shutdown, Any, [], End;
        socket SYS_socket, Any, [CONNECT, DestinationCaller, LIVE_SAVE, MIGRATION], Begin;
        write SYS_write, Any, [], Any;
    }
    Tcp {
        getsockname SYS_getsockname, Any, [DestinationCaller], Begin;
    }
    Unix {
        statx SYS_statx, Any, [LISTENER], Any;
        unlink SYS_unlink, Any, [LISTENER], End;
    }
    Multifd {
        connect SYS_connect, Any, [CONNECT], Begin;
        getpeername SYS_getpeername, Any, [CONNECT], Begin;
        ioctl SYS_ioctl, is(1, 0x5421, "FIONBIO"), [CONNECT], Begin;
        madvise SYS_madvise, is(2, 0x17, "MADV_POPULATE_WRITE"), [LANE], Pages;
    }
    Tls {
        recvfrom SYS_recvfrom, Any, [], Any;
    }
    File {
        flock SYS_flock, Any, [LIVE_SAVE, MIGRATION], Begin;
        fstat SYS_fstat, Any, [LIVE_SAVE, MIGRATION], Any;
        fsync SYS_fsync, Any, [LIVE_SAVE, MIGRATION], End;
        getdents64 SYS_getdents64, Any, [MIGRATION], Begin;
        getpid SYS_getpid, Any, [LIVE_SAVE, MIGRATION], Any;
        newfstatat SYS_newfstatat, Any, [LIVE_SAVE, MIGRATION], Any;
        openat SYS_openat, Any, [LIVE_SAVE, MIGRATION], Any;
        preadv SYS_preadv, Any, [LOADER], Pages;
        pwritev SYS_pwritev, Any, [LANE, LIVE_SAVE, MIGRATION], Pages;
        renameat2 SYS_renameat2, Any, [LIVE_SAVE, MIGRATION], End;
        statx SYS_statx, Any, [MIGRATION], Any;
        unlink SYS_unlink, Any, [LIVE_SAVE, MIGRATION], End;
    }
    DirectIo {
        io_uring_enter SYS_io_uring_enter, Any, [LANE, LIVE_SAVE, LOADER], Pages;
        io_uring_register SYS_io_uring_register, Any, [LIVE_SAVE, LOADER, MIGRATION], Begin;
        io_uring_setup SYS_io_uring_setup, Any, [LANE, LIVE_SAVE, LOADER, MIGRATION], Begin;
    }
    Rdma {
        bind SYS_bind, Any, [], Any;
        connect SYS_connect, Any, [MIGRATION], Begin;
        eventfd2 SYS_eventfd2, Any, [], Any;
        fcntl SYS_fcntl, is(1, 4, "F_SETFL"), [CONNECT, DestinationCaller, GREETER, LISTENER, MIGRATION], Begin;
        fstat SYS_fstat, Any, [], Any;
        getdents64 SYS_getdents64, Any, [], End;
        getpid SYS_getpid, Any, [DestinationCaller, MIGRATION], Begin;
        getsockname SYS_getsockname, Any, [], End;
        ioctl SYS_ioctl, is(1, 0xc0181b01, "RDMA_VERBS_IOCTL"), [], Any;
        newfstatat SYS_newfstatat, Any, [DestinationCaller, MIGRATION], Begin;
        openat SYS_openat, is(2, 0x8_0002, "O_RDWR | O_CLOEXEC"), [CONNECT, DestinationCaller, GREETER, LISTENER, MIGRATION], Begin;
        ppoll SYS_ppoll, Any, [], Any;
        prlimit64 SYS_prlimit64, Any, [], Any;
        recvmsg SYS_recvmsg, Any, [], Any;
        sendmsg SYS_sendmsg, Any, [DestinationCaller, MIGRATION], Begin;
        sendto SYS_sendto, Any, [], End;
        setsockopt SYS_setsockopt, Any, [DestinationCaller, MIGRATION], Begin;
        socket SYS_socket, is(0, 1, "AF_UNIX"), [MIGRATION], Begin;
        socket SYS_socket, is(0, 16, "AF_NETLINK"), [], Any;
        statx SYS_statx, Any, [], Any;
        write SYS_write, Any, [], Any;
    }
    Postcopy {
        fallocate SYS_fallocate, is(1, 3, "FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE"), [LOADER], Switchover;
        ioctl SYS_ioctl, is(1, 0x8010aa01, "UFFDIO_UNREGISTER"), [INCOMING], End;
        ioctl SYS_ioctl, is(1, 0x8010aa02, "UFFDIO_WAKE"), [INCOMING], Pages;
        ioctl SYS_ioctl, is(1, 0xc018aa3f, "UFFDIO_API"), [DestinationCaller, LOADER], Begin;
        ioctl SYS_ioctl, is(1, 0xc020aa00, "UFFDIO_REGISTER"), [LOADER], Switchover;
        ioctl SYS_ioctl, is(1, 0xc020aa04, "UFFDIO_ZEROPAGE"), [LANE, LOADER], Pages;
        ioctl SYS_ioctl, is(1, 0xc028aa03, "UFFDIO_COPY"), [LANE, LOADER], Pages;
        poll SYS_poll, Any, [FAULTS], Any;
        userfaultfd SYS_userfaultfd, Any, [DestinationCaller, LOADER], Begin;
    }
    UserfaultfdByDevice {
        ioctl SYS_ioctl, is(1, 0xaa00, "USERFAULTFD_IOC_NEW"), [DestinationCaller, LIVE_SAVE, LOADER, MIGRATION], Begin;
        openat SYS_openat, Any, [DestinationCaller, LIVE_SAVE, LOADER, MIGRATION], Begin;
    }
    SameHost {
        fcntl SYS_fcntl, is(1, 0x409, "F_ADD_SEALS"), [INCOMING, MIGRATION], Switchover;
        fcntl SYS_fcntl, is(1, 0x40a, "F_GET_SEALS"), [GREETER], Switchover;
        fcntl SYS_fcntl, is(1, 3, "F_GETFL"), [GREETER], Switchover;
        fstatfs SYS_fstatfs, Any, [GREETER], Switchover;
        ftruncate SYS_ftruncate, Any, [INCOMING, MIGRATION], Switchover;
        geteuid SYS_geteuid, Any, [GREETER, MIGRATION], Begin;
        memfd_create SYS_memfd_create, Any, [INCOMING, MIGRATION], Begin;
        statx SYS_statx, Any, [GREETER], Any;
    }
    KvmDirtyLog {
        ioctl SYS_ioctl, is(1, 0x4010ae42, "KVM_GET_DIRTY_LOG"), [LIVE_SAVE, MIGRATION], Pages;
        ioctl SYS_ioctl, is(1, 0x4020ae46, "KVM_SET_USER_MEMORY_REGION"), [MIGRATION, SourceCaller], Begin;
        ioctl SYS_ioctl, is(1, 0x4068aea3, "KVM_ENABLE_CAP"), [MIGRATION, SourceCaller], Begin;
        ioctl SYS_ioctl, is(1, 0xae03, "KVM_CHECK_EXTENSION"), [MIGRATION, SourceCaller], Begin;
        ioctl SYS_ioctl, is(1, 0xc018aec0, "KVM_CLEAR_DIRTY_LOG"), [LANE, LIVE_SAVE, MIGRATION, SourceCaller], Pages;
    }
    KvmDirtyRing {
        ioctl SYS_ioctl, is(1, 0x4020ae46, "KVM_SET_USER_MEMORY_REGION"), [MIGRATION, SourceCaller], Begin;
        ioctl SYS_ioctl, is(1, 0xaec7, "KVM_RESET_DIRTY_RINGS"), [LIVE_SAVE, MIGRATION], Pages;
    }
    UffdDirtyLog {
        ioctl SYS_ioctl, is(1, 0x8010aa01, "UFFDIO_UNREGISTER"), [MIGRATION], End;
        ioctl SYS_ioctl, is(1, 0xc018aa06, "UFFDIO_WRITEPROTECT"), [MIGRATION], Begin;
        ioctl SYS_ioctl, is(1, 0xc018aa3f, "UFFDIO_API"), [MIGRATION], Begin;
        ioctl SYS_ioctl, is(1, 0xc020aa00, "UFFDIO_REGISTER"), [MIGRATION], Begin;
        ioctl SYS_ioctl, is(1, 0xc0606610, "PAGEMAP_SCAN"), [LANE, MIGRATION], Pages;
        userfaultfd SYS_userfaultfd, Any, [MIGRATION], Begin;
    }
    LiveSave {
        eventfd2 SYS_eventfd2, Any, [LIVE_SAVE], Begin;
        ioctl SYS_ioctl, is(1, 0x8010aa01, "UFFDIO_UNREGISTER"), [HELD_WRITES, LIVE_SAVE], End;
        ioctl SYS_ioctl, is(1, 0x8010aa02, "UFFDIO_WAKE"), [HELD_WRITES, LIVE_SAVE], End;
        ioctl SYS_ioctl, is(1, 0xc018aa06, "UFFDIO_WRITEPROTECT"), [HELD_WRITES, LIVE_SAVE], Any;
        ioctl SYS_ioctl, is(1, 0xc018aa3f, "UFFDIO_API"), [LIVE_SAVE], Begin;
        ioctl SYS_ioctl, is(1, 0xc020aa00, "UFFDIO_REGISTER"), [LIVE_SAVE], Begin;
        poll SYS_poll, Any, [HELD_WRITES], Any;
        userfaultfd SYS_userfaultfd, Any, [LIVE_SAVE], Begin;
        write SYS_write, Any, [LIVE_SAVE], End;
    }
    Standby {
        connect SYS_connect, Any, [SourceCaller], Begin;
        fallocate SYS_fallocate, is(1, 3, "FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE"), [LOADER, STANDBY], Any;
        fcntl SYS_fcntl, is(1, 0x406, "F_DUPFD_CLOEXEC"), [LOADER], Begin;
        fcntl SYS_fcntl, is(1, 0x409, "F_ADD_SEALS"), [LOADER], Begin;
        fstatfs SYS_fstatfs, Any, [LOADER], Begin;
        ftruncate SYS_ftruncate, Any, [LOADER], Begin;
        getpeername SYS_getpeername, Any, [GREETER, SourceCaller], Begin;
        ioctl SYS_ioctl, is(1, 0x5421, "FIONBIO"), [SourceCaller], Begin;
        memfd_create SYS_memfd_create, Any, [LOADER], Begin;
        socket SYS_socket, Any, [SourceCaller], Begin;
        statx SYS_statx, Any, [STANDBY], End;
    }
    StandbyCopyOnWrite {
        ioctl SYS_ioctl, is(1, 0x8010aa01, "UFFDIO_UNREGISTER"), [CHECKPOINT_COPIER, HELD_WRITES, MIGRATION], End;
        ioctl SYS_ioctl, is(1, 0x8010aa02, "UFFDIO_WAKE"), [CHECKPOINT_COPIER, HELD_WRITES, MIGRATION], End;
        ioctl SYS_ioctl, is(1, 0xc018aa06, "UFFDIO_WRITEPROTECT"), [CHECKPOINT_COPIER, HELD_WRITES, LANE, MIGRATION], Pages;
        ioctl SYS_ioctl, is(1, 0xc018aa3f, "UFFDIO_API"), [MIGRATION], Begin;
        ioctl SYS_ioctl, is(1, 0xc020aa00, "UFFDIO_REGISTER"), [MIGRATION], Begin;
        poll SYS_poll, Any, [HELD_WRITES], Any;
        userfaultfd SYS_userfaultfd, Any, [MIGRATION], Begin;
    }
    LazyRestore {
        epoll_create1 SYS_epoll_create1, Any, [DestinationCaller], Begin;
        epoll_ctl SYS_epoll_ctl, Any, [DestinationCaller], Begin;
        epoll_pwait SYS_epoll_pwait, Any, [SERVE_FAULTS], Any;
        eventfd2 SYS_eventfd2, Any, [DestinationCaller], Begin;
        ioctl SYS_ioctl, is(1, 0x8010aa01, "UFFDIO_UNREGISTER"), [DestinationCaller, FILL, READER, SERVE_FAULTS], End;
        ioctl SYS_ioctl, is(1, 0x8010aa02, "UFFDIO_WAKE"), [DestinationCaller, FILL, READER, SERVE_FAULTS], Any;
        ioctl SYS_ioctl, is(1, 0xc018aa3f, "UFFDIO_API"), [DestinationCaller], Begin;
        ioctl SYS_ioctl, is(1, 0xc020aa00, "UFFDIO_REGISTER"), [DestinationCaller], Begin;
        ioctl SYS_ioctl, is(1, 0xc020aa04, "UFFDIO_ZEROPAGE"), [FILL, READER, SERVE_FAULTS], Pages;
        ioctl SYS_ioctl, is(1, 0xc028aa03, "UFFDIO_COPY"), [FILL, READER, SERVE_FAULTS], Pages;
        pread64 SYS_pread64, Any, [FILL, READER, SERVE_FAULTS], Pages;
        preadv2 SYS_preadv2, Any, [FILL, READER, SERVE_FAULTS], Pages;
        statx SYS_statx, Any, [FILL, READER, SERVE_FAULTS], Pages;
        userfaultfd SYS_userfaultfd, Any, [DestinationCaller], Begin;
        write SYS_write, Any, [DestinationCaller], End;
    }
    FilterPerThread {
        prctl SYS_prctl, is(0, 38, "PR_SET_NO_NEW_PRIVS"), [], Begin;
        seccomp SYS_seccomp, Any, [], Begin;
    }
}
