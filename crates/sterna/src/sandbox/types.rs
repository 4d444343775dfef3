//! The parts of a line of the table.

use sterna_ram::threads::ThreadRole;

/// A part of the engine that makes system calls of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Feature {
    /// Calls of the allocator, of threads and of locks. Every selection contains it.
    Runtime,
    /// The rules of every migration, whatever its settings are.
    Always,
    /// Guest memory without a file, or on hugetlbfs: its absent pages are found by the page table.
    PrivateMemory,
    /// Guest memory on huge pages (hugetlbfs), besides the lines of [`Feature::PrivateMemory`].
    HugePages,
    /// A migration over `tcp:`, `unix:` or a socket of the VMM.
    Sockets,
    /// `tcp:` with an IP address.
    ///
    /// A host name is looked up by the C library, which loads modules and reads files. No table covers that: resolve names
    /// before the process locks itself in, and pass numbers.
    Tcp,
    /// `unix:`.
    Unix,
    /// [`Capabilities::multifd`](crate::Capabilities::multifd) over sockets.
    Multifd,
    /// [`Parameters::tls`](crate::Parameters::tls).
    Tls,
    /// `file:`: saving and restoring.
    File,
    /// `file:` with [`Parameters::direct_io`](crate::Parameters::direct_io).
    DirectIo,
    /// `rdma:`, after [`RdmaParameters::load_libraries`](crate::RdmaParameters::load_libraries).
    ///
    /// The libraries and the adapter's driver make most of these calls. The lines were recorded with soft-RoCE and
    /// rdma-core 65.
    Rdma,
    /// [`Capabilities::postcopy_ram`](crate::Capabilities::postcopy_ram).
    Postcopy,
    /// A process without CAP_SYS_PTRACE uses `/dev/userfaultfd`: for postcopy's destination and for held writes.
    ///
    /// With [`keep_userfaultfd`](crate::ram::keep_userfaultfd) the file is not opened again.
    UserfaultfdByDevice,
    /// [`MigrationMode::CprTransfer`](crate::MigrationMode::CprTransfer).
    SameHost,
    /// [`KvmDirtyLog`](crate::ram::dirty::KvmDirtyLog) is the dirty source.
    KvmDirtyLog,
    /// [`KvmDirtyRing`](crate::ram::dirty::KvmDirtyRing) is the dirty source.
    KvmDirtyRing,
    /// [`UffdDirtyLog`](crate::ram::dirty::UffdDirtyLog) is the dirty source.
    UffdDirtyLog,
    /// [`LiveSave`](crate::LiveSave), also with a [`ChangeLog`](crate::ChangeLog), besides the lines of its target.
    LiveSave,
    /// A guest that a standby protects (`sterna-standby`), besides the lines of its connections: the primary and the standby.
    Standby,
    /// A primary copies pages of a checkpoint after the guest resumes (`CheckpointCopy::CopyOnWrite` and `Auto`).
    StandbyCopyOnWrite,
    /// The VMM's own guest runs while a `sterna-pager` fills its memory out of an image (`Pager::serve_own`).
    LazyRestore,
    /// The hook of the threads installs a seccomp filter by itself.
    FilterPerThread,
}

impl Feature {
    /// All features, in the order of the table.
    pub const ALL: &'static [Self] = &[
        Self::Runtime,
        Self::Always,
        Self::PrivateMemory,
        Self::HugePages,
        Self::Sockets,
        Self::Tcp,
        Self::Unix,
        Self::Multifd,
        Self::Tls,
        Self::File,
        Self::DirectIo,
        Self::Rdma,
        Self::Postcopy,
        Self::UserfaultfdByDevice,
        Self::SameHost,
        Self::KvmDirtyLog,
        Self::KvmDirtyRing,
        Self::UffdDirtyLog,
        Self::LiveSave,
        Self::Standby,
        Self::StandbyCopyOnWrite,
        Self::LazyRestore,
        Self::FilterPerThread,
    ];
}

/// A thread that makes system calls of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Thread {
    /// The VMM's thread that calls `Migration::start`, or another function of a source.
    SourceCaller,
    /// The VMM's thread that calls `Incoming::listen`, or another function of a destination.
    DestinationCaller,
    /// A thread of the engine.
    Engine(ThreadRole),
}

/// The part of a migration in which a call is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum When {
    /// At any time.
    Any,
    /// Before the first page: connecting, the handshake, opening files.
    Begin,
    /// While pages move and the guest runs.
    Pages,
    /// From the stop of the guest at the source to its start at the destination.
    Switchover,
    /// After the switchover, or after a failure or a cancel.
    End,
}

/// The condition on an argument of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Argument {
    /// The call is made with many values.
    Any,
    /// The argument at `index` (from 0) is `value`; only its lower 32 bits count.
    Is {
        /// Position of the argument, from 0.
        index: u8,
        /// The value.
        value: u32,
        /// The value's name in the kernel's headers.
        name: &'static str,
    },
    /// The argument at `index` has none of these bits.
    Lacks {
        /// Position of the argument, from 0.
        index: u8,
        /// The bits.
        bits: u32,
        /// The bits' name in the kernel's headers.
        name: &'static str,
    },
}

impl Argument {
    /// Whether these arguments of a call satisfy the condition.
    pub fn allows(&self, arguments: &[u64; 6]) -> bool {
        match *self {
            Self::Any => true,
            Self::Is { index, value, .. } => arguments[usize::from(index)] as u32 == value,
            Self::Lacks { index, bits, .. } => arguments[usize::from(index)] as u32 & bits == 0,
        }
    }
}

/// A line of the table: a call, and who makes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Syscall {
    /// Name of the call in the kernel.
    pub name: &'static str,
    /// Number of the call on this architecture.
    pub number: i64,
    /// The condition on the call's arguments.
    pub argument: Argument,
    /// The threads that make the call; empty: every thread.
    pub threads: &'static [Thread],
    /// When the threads make the call.
    pub when: When,
    /// The feature that needs the call.
    pub feature: Feature,
}

impl Syscall {
    /// Whether that thread itself makes the call.
    pub fn is_made_by(&self, thread: Thread) -> bool {
        self.threads.is_empty() || self.threads.contains(&thread)
    }
}
