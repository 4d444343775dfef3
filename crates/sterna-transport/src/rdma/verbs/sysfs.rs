//! RDMA devices in the kernel's sysfs, readable without any library.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Path of `/sys`, or of a directory with parts of it for tests.
#[derive(Debug, Clone)]
pub(crate) struct Sysfs(PathBuf);

/// An entry of a port's table of global identifiers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Gid {
    pub(crate) index: u32,
    /// The identifier, written as an IPv6 address.
    pub(crate) gid: String,
    /// `RoCE v2` or `IB/RoCE v1`; empty if the kernel does not report it.
    pub(crate) kind: String,
    /// Name of the network interface; empty if there is none.
    pub(crate) interface: String,
}

impl Default for Sysfs {
    fn default() -> Self {
        Self("/sys".into())
    }
}

impl Sysfs {
    /// Names of all RDMA devices.
    pub(crate) fn devices(&self) -> Vec<String> {
        names(&self.0.join("class/infiniband"))
    }

    /// Numbers of a device's ports.
    pub(crate) fn ports(&self, device: &str) -> Vec<u8> {
        let names = names(&self.0.join("class/infiniband").join(device).join("ports"));
        let mut ports: Vec<u8> = names.iter().filter_map(|name| name.parse().ok()).collect();
        ports.sort_unstable();
        ports
    }

    /// The used entries of a port's table of global identifiers.
    pub(crate) fn gids(&self, device: &str, port: u8) -> Vec<Gid> {
        let port = self.port(device, port);
        // A table has up to 1024 entries, most of them unused. For unused ones only the identifier is read.
        let entry = |index: u32| {
            let at = |directory: &str| word(&port.join(directory).join(index.to_string()));
            let gid = Some(shortened(&at("gids"))).filter(|gid| !["", "::"].contains(&gid.as_str()))?;
            Some(Gid { index, gid, kind: at("gid_attrs/types"), interface: at("gid_attrs/ndevs") })
        };
        let mut indices: Vec<u32> =
            names(&port.join("gids")).iter().filter_map(|name| name.parse().ok()).collect();
        indices.sort_unstable();
        indices.into_iter().filter_map(entry).collect()
    }

    /// Network interfaces over a port: those of RoCE, or of IP over InfiniBand.
    pub(crate) fn interfaces(&self, device: &str, port: u8) -> BTreeSet<String> {
        let roce = self.gids(device, port).into_iter().map(|gid| gid.interface);
        let interfaces = self.0.join("class/net");
        let is_over = |name: &String| {
            let interface = interfaces.join(name);
            interface.join("device/infiniband").join(device).exists()
                // 32 is ARPHRD_INFINIBAND.
                && word(&interface.join("type")) == "32"
                && word(&interface.join("dev_port")).parse() == Ok(port - 1)
        };
        let over_infiniband = names(&interfaces).into_iter().filter(is_over);
        roce.chain(over_infiniband).filter(|name| !name.is_empty()).collect()
    }

    fn port(&self, device: &str, port: u8) -> PathBuf {
        self.0.join("class/infiniband").join(device).join("ports").join(port.to_string())
    }
}

/// Shortens `0000:…:ffff:0a09:0001` to `::ffff:10.9.0.1`.
fn shortened(gid: &str) -> String {
    gid.parse::<std::net::Ipv6Addr>().map_or_else(|_| gid.to_owned(), |address| address.to_string())
}

fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    names
}

/// The text of a file without the newline. Empty if it cannot be read, as for unused entries.
fn word(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sysfs(files: &[(&str, &str)]) -> (tempfile::TempDir, Sysfs) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, format!("{text}\n")).unwrap();
        }
        let sysfs = Sysfs(root.path().into());
        (root, sysfs)
    }

    #[test]
    fn roce_port_has_its_gids_and_their_interfaces() {
        let (_root, sysfs) = sysfs(&[
            ("class/infiniband/rxe0/ports/1/state", "4: ACTIVE"),
            ("class/infiniband/rxe0/ports/1/gids/0", "fe80:0000:0000:0000:1c4b:2eff:fe5d:0001"),
            ("class/infiniband/rxe0/ports/1/gids/1", "0000:0000:0000:0000:0000:ffff:0a09:0001"),
            ("class/infiniband/rxe0/ports/1/gids/10", "0000:0000:0000:0000:0000:0000:0000:0000"),
            ("class/infiniband/rxe0/ports/1/gid_attrs/types/1", "RoCE v2"),
            ("class/infiniband/rxe0/ports/1/gid_attrs/ndevs/1", "v0"),
        ]);

        assert_eq!((sysfs.devices(), sysfs.ports("rxe0")), (vec!["rxe0".to_owned()], vec![1]));
        let gids = sysfs.gids("rxe0", 1);
        assert_eq!(gids.len(), 2);
        let (gid, kind, interface) = ("::ffff:10.9.0.1".into(), "RoCE v2".into(), "v0".into());
        assert_eq!(gids[1], Gid { index: 1, gid, kind, interface });
        assert_eq!(sysfs.interfaces("rxe0", 1), ["v0".to_owned()].into());
    }

    #[test]
    fn infiniband_port_has_the_interface_of_its_number() {
        let (_root, sysfs) = sysfs(&[
            ("class/infiniband/mlx5_0/ports/2/gids/0", "fe80:0000:0000:0000:0002:c903:0000:0001"),
            ("class/net/ib0/type", "32"),
            ("class/net/ib0/dev_port", "0"),
            ("class/net/ib0/device/infiniband/mlx5_0/x", ""),
            ("class/net/ib1/type", "32"),
            ("class/net/ib1/dev_port", "1"),
            ("class/net/ib1/device/infiniband/mlx5_0/x", ""),
            ("class/net/eth0/type", "1"),
            ("class/net/eth0/dev_port", "1"),
        ]);

        assert_eq!(sysfs.interfaces("mlx5_0", 2), ["ib1".to_owned()].into());
    }

    #[test]
    fn host_without_devices_has_none() {
        let (_root, sysfs) = sysfs(&[]);

        assert!(
            sysfs.devices().is_empty() && sysfs.ports("rxe0").is_empty() && sysfs.gids("rxe0", 1).is_empty()
        );
    }
}
