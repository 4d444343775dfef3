//! Finds out whether a VM was started with `-S`, where this is possible.
//!
//! Monitors do not report it. With and without `-S`, a waiting QEMU 7.2 or 11.1 answers in the same way: every
//! `query-*`, every property below `/machine`, and some twenty tables of `info`. On the same host, the command line
//! of the process shows it.

use rustix::net::AddressFamily;
use rustix::net::sockopt::{socket_domain, socket_peercred};
use serde_json::Value;

use super::Vm;

impl Vm {
    /// Whether this VM was started with `-S`, so that an arriving guest stays paused until `cont`. None if this is
    /// unknown here: the VM's own process on this host must have created the monitor's Unix socket.
    pub fn was_started_stopped(&mut self) -> Option<bool> {
        let socket = self.client().socket();
        if socket_domain(socket).ok()? != AddressFamily::UNIX {
            return None;
        }
        let process = socket_peercred(socket).ok()?.pid.as_raw_nonzero();
        // The peer may be a proxy, whose command line is irrelevant. Only the VM's process has the vCPU threads.
        let vcpus = self.try_execute("query-cpus-fast", Value::Null).ok()?;
        let thread = vcpus[0]["thread-id"].as_u64()?;
        if !std::path::Path::new(&format!("/proc/{process}/task/{thread}")).exists() {
            return None;
        }
        Some(says_stopped(&std::fs::read(format!("/proc/{process}/cmdline")).ok()?))
    }
}

/// Whether the NUL-terminated arguments include `-S`.
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
