//! A link of known speed: the loopback of a network namespace with a token bucket.

use std::process::Command;

use crate::Failure;

/// The namespace, which is removed when this is dropped.
pub struct Link {
    name: String,
}

impl Link {
    /// Makes a link of `megabytes` MB/s.
    pub fn new(megabytes: u64) -> Result<Self, Failure> {
        let name = format!("sterna-bench-{}", std::process::id());
        ip(&["netns", "add", &name])?;
        let link = Self { name };
        ip(&["-n", &link.name, "link", "set", "lo", "up"])?;
        let rate = format!("{}mbit", megabytes * 8);
        // A bucket of some packets of 64 KiB, and a queue of 20 ms.
        let shape =
            ["qdisc", "add", "dev", "lo", "root", "tbf", "rate", &rate, "burst", "512kb", "latency", "20ms"];
        run("ip", &[&["netns", "exec", &link.name, "tc"], &shape[..]].concat())?;
        // Both programs get reno. On loopback, Sterna selects reno, but QEMU uses the system's default.
        let reno = "echo reno > /proc/sys/net/ipv4/tcp_congestion_control";
        ip(&["netns", "exec", &link.name, "sh", "-c", reno])?;
        Ok(link)
    }

    /// Name of the namespace.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Err(why) = ip(&["netns", "del", &self.name]) {
            #[allow(clippy::print_stderr, reason = "somebody has to remove it")]
            {
                eprintln!("{why}");
            }
        }
    }
}

fn ip(arguments: &[&str]) -> Result<(), Failure> {
    run("ip", arguments)
}

fn run(program: &str, arguments: &[&str]) -> Result<(), Failure> {
    let said = Command::new(program).args(arguments).output();
    let said = said.map_err(|error| format!("no network namespace with a slow link: {program}: {error}"))?;
    if said.status.success() {
        return Ok(());
    }
    let why = String::from_utf8_lossy(&said.stderr);
    Err(format!("no network namespace with a slow link: {program} {}: {}", arguments.join(" "), why.trim()))
}
