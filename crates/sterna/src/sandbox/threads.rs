//! Which thread starts which.

use sterna_ram::threads::ThreadRole as Role;

use super::types::Thread;

/// Returns the roles of the threads that a thread starts itself.
///
/// They inherit its seccomp filters. Threads of a process that serves images to others are not listed.
pub fn started_by(thread: Thread) -> &'static [Role] {
    match thread {
        Thread::SourceCaller => &[
            Role::Migration,
            Role::LiveSave,
            Role::Protection,
            Role::ProtectionAnswers,
            Role::ProtectionEnd,
            Role::SeedingEnd,
            Role::Watchdog,
            Role::ByteGate,
            Role::PacketGate,
            // `Migration::resume_saved`.
            Role::CallDevice,
        ],
        Thread::DestinationCaller => {
            &[Role::Incoming, Role::Listener, Role::Configure, Role::ServeFaults, Role::Reader, Role::Fill]
        }
        Thread::Engine(Role::Migration) => &[
            Role::Lane,
            Role::ReturnPath,
            Role::SaveDevice,
            Role::CallDevice,
            Role::RequestedPages,
            Role::RdmaWindows,
            Role::RdmaMemory,
            Role::Connect,
            Role::Resolve,
            Role::MergeDirty,
            Role::CopyPages,
            Role::HeldWrites,
            Role::CheckpointCopier,
        ],
        Thread::Engine(Role::LiveSave) => &[Role::HeldWrites, Role::Connect, Role::Resolve],
        Thread::Engine(Role::Connect) => &[Role::Resolve],
        Thread::Engine(Role::Listener) => &[Role::Greeter],
        Thread::Engine(Role::Greeter) => &[Role::Standby, Role::Heartbeats, Role::StandbyDisk],
        Thread::Engine(Role::Protection) => &[Role::ProtectionStep],
        Thread::Engine(Role::Standby) => &[Role::ProtectionStep],
        Thread::Engine(Role::Configure) => &[Role::Incoming],
        Thread::Engine(Role::Incoming) => &[
            Role::LoadDevice,
            Role::CallDevice,
            Role::Lane,
            Role::Loader,
            Role::Listener,
            Role::Start,
            Role::TakeOver,
            Role::Announce,
            Role::PageFaults,
            Role::Package,
            Role::PreemptChannel,
        ],
        Thread::Engine(Role::Loader) => {
            &[Role::Lane, Role::PageFaults, Role::Package, Role::PreemptChannel, Role::CallDevice]
        }
        Thread::Engine(Role::Lane) => &[Role::PageFaults],
        Thread::Engine(_) => &[],
    }
}
