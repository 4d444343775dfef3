//! Settings of a migration over RDMA, and the QEMU at either end.

use std::hash::{DefaultHasher, Hasher as _};
use std::sync::atomic::{AtomicU16, Ordering};

use serde_json::{Value, json};
use sterna::{Capabilities, ChunkSize, Parameters, RdmaParameters};

use super::{ADDRESS, ADDRESS_V6, wire};
use crate::qemu::Qemu;
use crate::{Accelerator, Builder, Failure, Ram, Root, fill};

/// RAM of the guests, MiB.
const MEMORY_MIB: u64 = 32;

/// The addresses of the two sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Path {
    /// The same address on both sides: the device loops packets back.
    Ipv4,
    /// The same with an IPv6 address.
    Ipv6,
    /// Two devices with a wire between them, if there is one ([`super::wire`]).
    Wire,
}

impl Path {
    const ALL: [Self; 3] = [Self::Ipv4, Self::Ipv6, Self::Wire];

    fn name(self) -> &'static str {
        match self {
            Self::Ipv4 => "IPv4",
            Self::Ipv6 => "IPv6",
            Self::Wire => "over a wire",
        }
    }

    fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|path| path.name() == name)
    }
}

/// Settings of a migration over RDMA.
#[derive(Clone, Copy, Debug)]
pub(super) struct Way {
    /// `x-rdma-chunk-size` of source and destination, in MiB.
    pub(super) chunks_mib: [u64; 2],
    pub(super) pin_all: bool,
    pub(super) return_path: bool,
    pub(super) path: Path,
    /// Number of multifd channels between two Sternas; 0: none.
    pub(super) lanes: u8,
    /// A Sterna's `x-sterna-rdma-pinned-limit`, MiB; 0: no limit.
    pub(super) pinned_limit_mib: u64,
}

impl Way {
    pub(super) const PLAIN: Self = Self {
        chunks_mib: [1, 1],
        pin_all: false,
        return_path: true,
        path: Path::Ipv4,
        lanes: 0,
        pinned_limit_mib: 0,
    };

    pub(super) fn name(&self) -> String {
        let Self { chunks_mib: [source, destination], return_path, path, .. } = self;
        let registration = self.registration();
        let return_path = if *return_path { "with" } else { "without" };
        let path = path.name();
        format!("{registration}, chunks of {source} and {destination} MiB, {return_path} return path, {path}")
    }

    /// Text for the registration of memory and the number of channels.
    pub(super) fn registration(&self) -> String {
        let mut text = if self.pin_all { "all pinned" } else { "dynamic" }.to_owned();
        if self.lanes > 0 {
            text += &format!(", multifd {}", self.lanes);
        }
        if self.pinned_limit_mib > 0 {
            text += &format!(", at most {} MiB pinned", self.pinned_limit_mib);
        }
        text
    }

    /// A port that no other migration of this run uses.
    pub(super) fn next_port() -> u16 {
        static NEXT: AtomicU16 = AtomicU16::new(4444);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }

    /// An address that no other migration of this run uses.
    pub(super) fn uri(&self) -> String {
        let port = Self::next_port();
        match self.path {
            Path::Ipv4 => format!("rdma:{ADDRESS}:{port}"),
            Path::Ipv6 => format!("rdma:[{ADDRESS_V6}]:{port}"),
            Path::Wire => format!("rdma:{}:{port}", wire::ADDRESSES[1]),
        }
    }

    /// Configures a QEMU that will be the source.
    pub(super) fn set_source(&self, qemu: &mut Qemu) -> Result<(), Failure> {
        self.set(qemu, self.chunks_mib[0])
    }

    /// Configures a QEMU that will be the destination.
    pub(super) fn set_destination(&self, qemu: &mut Qemu) -> Result<(), Failure> {
        self.set(qemu, self.chunks_mib[1])
    }

    fn set(&self, qemu: &mut Qemu, chunk_mib: u64) -> Result<(), Failure> {
        for (name, is_on) in [("rdma-pin-all", self.pin_all), ("return-path", self.return_path)] {
            if is_on { qemu.capabilities(&[name]) } else { qemu.capabilities_off(&[name]) }?;
        }
        qemu.parameters(json!({ "x-rdma-chunk-size": chunk_mib << 20, "max-bandwidth": 0 }))
    }
}

impl Way {
    /// Parameters and capabilities of a Sterna on either side.
    pub(super) fn of_sterna(&self, chunk_mib: u64) -> (Parameters, Capabilities) {
        let chunk = ChunkSize::new(chunk_mib << 20).unwrap_or_default();
        let pinned_limit_bytes = (self.pinned_limit_mib > 0).then_some(self.pinned_limit_mib << 20);
        let rdma = RdmaParameters { chunk, pinned_limit_bytes, ..RdmaParameters::default() };
        let mut params = Parameters { max_bandwidth_bytes: 0, rdma, ..Parameters::default() };
        params.multifd_channels = self.lanes.max(1);
        let capabilities = Capabilities {
            rdma_pin_all: self.pin_all,
            return_path: self.return_path,
            multifd: self.lanes > 0,
            ..Capabilities::default()
        };
        (params, capabilities)
    }

    /// Encodes the settings for another process.
    pub(super) fn to_json(self) -> Value {
        let Self { chunks_mib, pin_all, return_path, path, lanes, pinned_limit_mib } = self;
        json!({
            "chunks": chunks_mib, "pin_all": pin_all, "return_path": return_path, "path": path.name(),
            "lanes": lanes, "pinned_limit": pinned_limit_mib,
        })
    }

    pub(super) fn of_json(value: &Value) -> Result<Self, Failure> {
        let number = |at: usize| value["chunks"][at].as_u64();
        let is = |name: &str| value[name].as_bool();
        let read = || {
            Some(Self {
                chunks_mib: [number(0)?, number(1)?],
                pin_all: is("pin_all")?,
                return_path: is("return_path")?,
                path: Path::named(value["path"].as_str()?)?,
                lanes: u8::try_from(value["lanes"].as_u64()?).ok()?,
                pinned_limit_mib: value["pinned_limit"].as_u64()?,
            })
        };
        read().ok_or_else(|| format!("{value} is no way"))
    }
}

/// A QEMU whose guest is paused, with the content of its RAM. It can be the source of several consecutive
/// migrations.
#[derive(Default)]
pub(super) struct Source(Option<(Qemu, Vec<u8>)>);

impl Source {
    /// The QEMU, which is started at the first call.
    pub(super) fn get(&mut self) -> Result<(&mut Qemu, &[u8]), Failure> {
        if let Some((qemu, _)) = &mut self.0 {
            // A machine can start another migration only after it has resumed.
            qemu.resume()?;
        } else {
            let qemu = still()?.spawn()?;
            fill(&qemu.directory().join("ram"), 1)?;
            let filled = ram(&qemu)?;
            self.0 = Some((qemu, filled));
        }
        self.0.as_mut().map(|(qemu, ram)| (qemu, ram.as_slice())).ok_or_else(|| "no source".to_owned())
    }
}

/// A machine whose RAM is a file in its directory.
pub(super) fn machine() -> Result<Builder, Failure> {
    let root = Root::qemu().ok_or("there is no QEMU in the tree")?;
    Ok(Qemu::builder(&root).memory_mib(MEMORY_MIB).ram(Ram::File))
}

/// A [`machine`] whose guest executes no instruction, even if it is resumed.
pub(super) fn still() -> Result<Builder, Failure> {
    Ok(machine()?.accelerator(Accelerator::Nothing))
}

/// A stopped machine's RAM.
pub(super) fn ram(qemu: &Qemu) -> Result<Vec<u8>, Failure> {
    let path = qemu.directory().join("ram");
    std::fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))
}

/// A hash of the bytes.
pub(super) fn digest(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

/// Checks that the received RAM equals the source's. The error names the first difference.
pub(super) fn same(left: &[u8], arrived: &[u8]) -> Result<(), Failure> {
    if left.len() != arrived.len() {
        return Err(format!("{} bytes of RAM left, {} arrived", left.len(), arrived.len()));
    }
    let pages = left.chunks(4096).zip(arrived.chunks(4096));
    let different: Vec<_> = pages.enumerate().filter(|(_, (a, b))| a != b).map(|(page, _)| page).collect();
    match different.first() {
        None => Ok(()),
        Some(first) => Err(format!("{} pages of RAM arrived changed, the first is {first}", different.len())),
    }
}
