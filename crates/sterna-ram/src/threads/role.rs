//! The roles of threads.

use std::fmt;

/// Declares the roles with their names.
macro_rules! roles {
    ($($(#[$about:meta])+ $role:ident = $name:literal,)+) => {
        /// The purpose of a thread that Sterna starts. docs/design/threads.md says what each does.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum ThreadRole {
            $($(#[$about])+ #[doc = concat!("\n\nName: `", $name, "`.")] $role,)+
        }

        impl ThreadRole {
            /// All roles.
            pub const ALL: &'static [Self] = &[$(Self::$role),+];

            /// The role's name, which later versions keep. The thread's name begins with it; Linux shows at most 15
            /// bytes of that name.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$role => $name,)+
                }
            }
        }
    };
}

roles! {
    /// Source: performs the migration's steps and calls the VMM.
    Migration = "migration",
    /// Either side: sends or receives pages on one channel, or reads and writes pages of a file.
    Lane = "lane",
    /// Source: reads the destination's answers.
    ReturnPath = "return path",
    /// Source: reads a device's stream; the thread's name has the device.
    SaveDevice = "save",
    /// Destination: loads a device's stream; the thread's name has the device.
    LoadDevice = "load",
    /// Either side: calls one of several devices' streams, in parallel with the others.
    CallDevice = "call",
    /// Source in postcopy: sends the pages that the destination requests.
    RequestedPages = "requested pages",
    /// Source over RDMA: asks the destination to register or clear memory.
    RdmaWindows = "rdma windows",
    /// Source over RDMA: registers this side's memory.
    RdmaMemory = "rdma memory",
    /// Opens one of several connections.
    Connect = "connect",
    /// Looks up a host name.
    Resolve = "resolve",
    /// Flushes an image to the disk while it is written.
    Flush = "flush",
    /// Helps to merge bitmaps of dirty pages.
    MergeDirty = "merge",
    /// Helps to copy pages of a protected guest.
    CopyPages = "copy",
    /// Destination: performs the migration's steps and calls the VMM.
    Incoming = "incoming",
    /// Destination: accepts connections.
    Listener = "listener",
    /// Destination: identifies one connection, with its TLS handshake.
    Greeter = "greeter",
    /// Destination: makes the VM from the source's configuration.
    Configure = "configure",
    /// Destination: reads the main channel or a file.
    Loader = "loader",
    /// Destination in postcopy: requests missing pages that were touched.
    PageFaults = "page faults",
    /// Destination in postcopy: loads the devices.
    Package = "package",
    /// Destination in postcopy: receives requested pages.
    PreemptChannel = "preempt channel",
    /// Destination in postcopy: starts the guest.
    Start = "start",
    /// Destination in postcopy: calls `TargetVm::take_over_paused`.
    TakeOver = "take over",
    /// Destination in postcopy: calls `Hook::announce`.
    Announce = "announce",
    /// Live save: pauses the guest for a moment, and sends the pages of that moment.
    LiveSave = "live save",
    /// Measures a dirty rate.
    DirtyRate = "dirty-rate",
    /// Protected guest, primary; live save: answers writers of pages that are not copied yet.
    HeldWrites = "held writes",
    /// Protected guest, primary: copies the pages of a checkpoint.
    CheckpointCopier = "checkpoint copier",
    /// Protected guest, primary: performs the protection's steps.
    Protection = "protection",
    /// Protected guest, primary: reads the standby's answers.
    ProtectionAnswers = "protection's answers",
    /// Protected guest, primary: ends the migration after the protection has ended.
    ProtectionEnd = "protection's end",
    /// Protected guest, primary: ends the protection after the migration has ended.
    SeedingEnd = "seeding's end",
    /// Protected guest, primary: feeds the host's watchdog.
    Watchdog = "watchdog",
    /// Protected guest, primary: lets out bytes of a socket.
    ByteGate = "gate",
    /// Protected guest, primary: lets out packets of a network card.
    PacketGate = "packet gate",
    /// Protected guest, standby: performs the standby's steps.
    Standby = "standby",
    /// Protected guest, standby: reads the primary's heartbeats.
    Heartbeats = "primary's heartbeats",
    /// Protected guest, either side: one step that may take long, for example a question to the arbiter.
    ProtectionStep = "step",
    /// Protected guest, standby: receives writes to one disk.
    StandbyDisk = "disk",
    /// Served image: control of one destination.
    Serve = "serve",
    /// Served image: accepts destinations.
    Reception = "reception",
    /// Served image: reads ahead.
    Reader = "reader",
    /// Served image: answers page faults of other VMMs.
    ServeFaults = "serve faults",
    /// Served image: fills the memory of other VMMs in the background.
    Fill = "fill",
}

impl fmt::Display for ThreadRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
