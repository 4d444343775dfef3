//! Whether a VM was started with `-S`, where that can be seen.
//!
//! No monitor tells: QEMU 7.2 and 11.1 that wait for a guest answer every `query-*`, every property below `/machine`
//! and some twenty tables of `info` alike with `-S` and without it. The process's command line tells, on its own host.

use rustix::net::AddressFamily;
use rustix::net::sockopt::{socket_domain, socket_peercred};
use serde_json::Value;

use super::Vm;

impl Vm {
    /// Whether this VM was started with `-S`: a guest that comes stays paused until `cont`. None if that cannot be
    /// seen from here: its monitor is not a Unix socket that the VM's own process on this host has made.
    pub fn was_started_stopped(&mut self) -> Option<bool> {
        let socket = self.client().socket();
        if socket_domain(socket).ok()? != AddressFamily::UNIX {
            return None;
        }
        let process = socket_peercred(socket).ok()?.pid.as_raw_nonzero();
        // A proxy's process would tell of the proxy. The VM's has the VM's threads.
        let vcpus = self.try_execute("query-cpus-fast", Value::Null).ok()?;
        let thread = vcpus[0]["thread-id"].as_u64()?;
        if !std::path::Path::new(&format!("/proc/{process}/task/{thread}")).exists() {
            return None;
        }
        Some(says_stopped(&std::fs::read(format!("/proc/{process}/cmdline")).ok()?))
    }
}

/// Whether `-S` is among arguments that each end in a NUL.
fn says_stopped(line: &[u8]) -> bool {
    line.split(|byte| *byte == 0).skip(1).any(|argument| matches!(argument, b"-S" | b"--S"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stopped_is_an_argument_of_its_own() {
        assert!(says_stopped(b"qemu-system-x86_64\0-m\x0064M\0-S\0"));
        assert!(says_stopped(b"ld.so\0--library-path\0/l\0qemu\0--S\0-incoming\0defer\0"));
        assert!(!says_stopped(b"qemu-system-x86_64\0-name\0a-S\0-serial\0none\0"));
        assert!(!says_stopped(b"-S\0"));
    }
}
