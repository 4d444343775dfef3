//! The limit and present amount of pinned memory of this process, from `/proc/self`.

use rustix::process::{Resource, getrlimit};

use crate::rdma::adapter::LockedMemory;

/// CAP_IPC_LOCK: the limit does not apply to a process with this capability.
const IPC_LOCK: u64 = 1 << 14;

/// The process's limit of pinned memory, and the amount that is pinned now.
pub(crate) fn locked_memory() -> LockedMemory {
    let limit = getrlimit(Resource::Memlock).current;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    of_status(&status, limit)
}

fn of_status(status: &str, limit: Option<u64>) -> LockedMemory {
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let capabilities = field("CapEff:").and_then(|text| u64::from_str_radix(text, 16).ok()).unwrap_or(0);
    let pinned = field("VmPin:").and_then(|text| text.split_whitespace().next()?.parse::<u64>().ok());
    LockedMemory {
        limit_bytes: limit.filter(|_| capabilities & IPC_LOCK == 0),
        pinned_bytes: pinned.unwrap_or(0) * 1024,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str =
        "Name:\tsterna\nVmLck:\t      16 kB\nVmPin:\t     128 kB\nCapPrm:\t000001ffffffffff\n";

    #[test]
    fn limit_binds_who_lacks_the_capability() {
        let status = format!("{STATUS}CapEff:\t0000000000003000\n");

        let locked = of_status(&status, Some(65536));

        assert_eq!(locked, LockedMemory { limit_bytes: Some(65536), pinned_bytes: 128 << 10 });
    }

    #[test]
    fn limit_does_not_bind_who_has_the_capability() {
        let status = format!("{STATUS}CapEff:\t0000000000004000\n");

        assert_eq!(of_status(&status, Some(65536)).limit_bytes, None);
        assert_eq!(of_status("", None), LockedMemory { limit_bytes: None, pinned_bytes: 0 });
    }
}
