//! What refuses each other, before anything is given away.

use std::sync::Arc;

use sterna::ram::{Custody, DirtySource, GuestRam};
use sterna::{
    Address, Capabilities, Compression, Device, Hook, Incoming, Migration, MigrationMode, Parameters,
    RunState, SourceVm, TargetVm, TlsEndpoint, Vm, VmError,
};
use sterna_guests::process::ProcessGuest;

use super::{banks, with_tls};
use crate::common;
use crate::support::{TestVm, small};

/// Which side refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Source,
    Destination,
}

/// What is set when it is refused.
struct Settings {
    side: Side,
    address: &'static str,
    params: Parameters,
    capabilities: Capabilities,
    /// A device with a stream.
    has_stream: bool,
    /// A device in another process.
    shares_ram: bool,
}

impl Settings {
    fn new() -> Self {
        Self {
            side: Side::Source,
            address: "tcp:127.0.0.1:0",
            params: common::parameters(),
            capabilities: Capabilities::default(),
            has_stream: false,
            shares_ram: false,
        }
    }

    fn postcopy(&mut self) {
        self.capabilities.postcopy_ram = true;
    }

    fn same_host(&mut self) {
        (self.address, self.params.mode) = ("unix:/nowhere", MigrationMode::CprTransfer);
    }

    fn zstd(&mut self) {
        self.capabilities.multifd = true;
        self.params.multifd_compression = Compression::Zstd;
    }

    fn file(&mut self) {
        self.address = "file:/nowhere/image";
    }

    fn rdma(&mut self) {
        self.address = "rdma:127.0.0.1:0";
    }

    fn tls(&mut self) {
        let endpoint = match self.side {
            Side::Source => TlsEndpoint::Client,
            Side::Destination => TlsEndpoint::Server,
        };
        self.params = with_tls(&self.params, crate::certificates::good_directory().path(), endpoint);
    }
}

/// As docs/combinations.md names them: one, the other, the words of the refusal, and how they are set.
type Pair = (&'static str, &'static str, &'static str, fn(&mut Settings));

const PAIRS: &[Pair] = &[
    ("postcopy", "file", "postcopy_ram does not go with a file", |s| {
        s.postcopy();
        s.file();
    }),
    ("postcopy", "file", "postcopy_ram does not go with a file", |s| {
        s.side = Side::Destination;
        s.postcopy();
        s.file();
    }),
    ("postcopy", "mapped-ram", "postcopy_ram does not go with a file", |s| {
        s.postcopy();
        s.file();
        s.capabilities.mapped_ram = true;
    }),
    ("postcopy", "RDMA", "postcopy_ram does not go with rdma:", |s| {
        s.postcopy();
        s.rdma();
    }),
    ("postcopy", "RDMA", "postcopy_ram does not go with rdma:", |s| {
        s.side = Side::Destination;
        s.postcopy();
        s.rdma();
    }),
    ("postcopy", "same-host", "postcopy_ram does not go with mode cpr-transfer", |s| {
        s.postcopy();
        s.same_host();
    }),
    ("postcopy", "vhost-user", "needs all of the guest's memory at once", |s| {
        s.postcopy();
        s.shares_ram = true;
    }),
    ("postcopy", "vfio-user", "needs all of the guest's memory at once", |s| {
        s.side = Side::Destination;
        s.postcopy();
        s.shares_ram = true;
    }),
    ("precopy", "xbzrle", "xbzrle is sent in the checkpoints of a protected guest alone", |s| {
        s.capabilities.xbzrle = true
    }),
    ("postcopy", "xbzrle", "xbzrle is sent in the checkpoints of a protected guest alone", |s| {
        s.postcopy();
        s.capabilities.xbzrle = true;
    }),
    ("xbzrle", "device streams", "xbzrle is sent in the checkpoints of a protected guest alone", |s| {
        s.capabilities.xbzrle = true;
        s.has_stream = true;
    }),
    ("xbzrle", "vhost-user", "xbzrle is sent in the checkpoints of a protected guest alone", |s| {
        s.capabilities.xbzrle = true;
        s.shares_ram = true;
    }),
    ("xbzrle", "vfio-user", "xbzrle is sent in the checkpoints of a protected guest alone", |s| {
        s.capabilities.xbzrle = true;
        s.shares_ram = true;
    }),
    ("xbzrle", "file", "xbzrle is sent in the checkpoints of a protected guest alone", |s| {
        s.capabilities.xbzrle = true;
        s.file();
    }),
    ("xbzrle", "RDMA", "xbzrle is sent in the checkpoints of a protected guest alone", |s| {
        s.capabilities.xbzrle = true;
        s.rdma();
    }),
    (
        "xbzrle",
        "pause-before-switchover",
        "xbzrle is sent in the checkpoints of a protected guest alone",
        |s| {
            (s.capabilities.xbzrle, s.capabilities.pause_before_switchover) = (true, true);
        },
    ),
    ("same-host", "xbzrle", "does not go with xbzrle", |s| {
        s.same_host();
        s.capabilities.xbzrle = true;
    }),
    ("same-host", "TLS", "does not go with tls", |s| {
        s.same_host();
        s.tls();
    }),
    ("same-host", "zstd, zlib", "does not go with multifd_compression", |s| {
        s.same_host();
        s.zstd();
    }),
    ("same-host", "auto-converge", "does not go with auto_converge", |s| {
        s.same_host();
        s.capabilities.auto_converge = true;
    }),
    ("same-host", "dirty-limit", "does not go with dirty_limit", |s| {
        s.same_host();
        s.capabilities.dirty_limit = true;
    }),
    ("same-host", "file", "which a Unix socket alone carries", |s| {
        s.same_host();
        s.file();
    }),
    ("same-host", "mapped-ram", "mapped_ram needs a file", |s| {
        s.same_host();
        s.capabilities.mapped_ram = true;
    }),
    ("same-host", "RDMA", "which a Unix socket alone carries", |s| {
        s.same_host();
        s.rdma();
    }),
    ("same-host", "vfio-user", "cannot follow it into another process", |s| {
        s.same_host();
        s.shares_ram = true;
    }),
    ("multifd", "file", "a file that holds a stream is one channel", |s| {
        s.file();
        s.capabilities.multifd = true;
    }),
    ("zstd, zlib", "file", "a file that holds a stream is one channel", |s| {
        s.file();
        s.zstd();
    }),
    ("zstd, zlib", "mapped-ram", "mapped_ram stores pages as they are", |s| {
        s.file();
        s.zstd();
        s.capabilities.mapped_ram = true;
    }),
    ("zstd, zlib", "RDMA", "rdma: carries no compressed pages", |s| {
        s.rdma();
        s.zstd();
    }),
    ("zstd, zlib", "RDMA", "rdma: carries no compressed pages", |s| {
        s.side = Side::Destination;
        s.rdma();
        s.zstd();
    }),
    ("TLS", "file", "a file does not support TLS", |s| {
        s.file();
        s.tls();
    }),
    ("TLS", "mapped-ram", "a file does not support TLS", |s| {
        s.file();
        s.capabilities.mapped_ram = true;
        s.tls();
    }),
    ("TLS", "RDMA", "rdma: carries no TLS", |s| {
        s.rdma();
        s.tls();
    }),
    ("TLS", "RDMA", "rdma: carries no TLS", |s| {
        s.side = Side::Destination;
        s.rdma();
        s.tls();
    }),
    ("switchover-ack", "file", "needs a destination that answers, which a file does not", |s| {
        s.file();
        s.capabilities.switchover_ack = true;
    }),
    ("switchover-ack", "mapped-ram", "needs a destination that answers, which a file does not", |s| {
        s.file();
        (s.capabilities.mapped_ram, s.capabilities.switchover_ack) = (true, true);
    }),
    ("mapped-ram", "RDMA", "mapped_ram needs a file", |s| {
        s.rdma();
        s.capabilities.mapped_ram = true;
    }),
    ("auto-converge", "dirty-limit", "dirty_limit and auto_converge exclude each other", |s| {
        (s.capabilities.auto_converge, s.capabilities.dirty_limit) = (true, true);
    }),
];

/// A VM with a device in another process.
struct Sharing(Arc<TestVm>);

impl Vm for Sharing {
    fn machine_type(&self) -> String {
        self.0.machine_type()
    }
    fn ram(&self) -> GuestRam {
        self.0.ram()
    }
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.0.devices()
    }
    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        self.0.hooks()
    }
    fn shares_ram_with(&self) -> Option<String> {
        Some("the device \"disk\" of another process".to_owned())
    }
}

impl SourceVm for Sharing {
    fn dirty_source(&self) -> &dyn DirtySource {
        self.0.dirty_source()
    }
    fn run_state(&self) -> RunState {
        self.0.run_state()
    }
    fn stop(&self) -> Result<(), VmError> {
        self.0.stop()
    }
    fn resume(&self) -> Result<(), VmError> {
        self.0.resume()
    }
}

impl TargetVm for Sharing {
    fn start(&self) -> Result<(), VmError> {
        self.0.start()
    }
    fn reset(&self) {
        self.0.reset();
    }
}

/// What it is refused with; nothing has begun.
fn refusal(settings: &Settings) -> Option<String> {
    let [ours, theirs] = banks(u32::from(settings.has_stream));
    let address: Address = settings.address.parse().unwrap();
    let (params, capabilities) = (settings.params.clone(), settings.capabilities);
    let vm = match settings.side {
        Side::Source => {
            let guest = ProcessGuest::boot(small()).unwrap();
            guest.cont().unwrap();
            TestVm::with_banks(guest, ours)
        }
        Side::Destination => TestVm::with_banks(ProcessGuest::waiting(small()).unwrap(), theirs),
    };
    let ram = vm.ram();
    let result = match (settings.side, settings.shares_ram) {
        (Side::Source, false) => {
            Migration::start(vm.clone(), &address, params, capabilities, Arc::new(())).map(drop)
        }
        (Side::Source, true) => {
            let vm = Arc::new(Sharing(vm.clone()));
            Migration::start(vm, &address, params, capabilities, Arc::new(())).map(drop)
        }
        (Side::Destination, false) => {
            Incoming::listen(vm.clone(), &address, params, capabilities, Arc::new(())).map(drop)
        }
        (Side::Destination, true) => {
            let vm = Arc::new(Sharing(vm.clone()));
            Incoming::listen(vm, &address, params, capabilities, Arc::new(())).map(drop)
        }
    };
    let error = result.err()?;
    assert_eq!(ram.custody(), Custody::Free, "{error}");
    if settings.side == Side::Source {
        common::assert_lives_on(&vm.guest);
    }
    Some(error.to_string())
}

#[test]
fn pair_that_cannot_go_together_is_refused_in_these_words() {
    for (one, other, words, set) in PAIRS {
        for has_it in [Side::Source, Side::Destination] {
            let mut settings = Settings::new();
            set(&mut settings);
            if settings.side != has_it {
                continue;
            }
            let Some(refusal) = refusal(&settings) else { panic!("{one} with {other} has begun") };
            assert!(refusal.contains(words), "{one} with {other}: {refusal}");
        }
    }
}

/// Those rows of the document that name this test, and no others, are those of this table.
#[test]
fn document_has_these_pairs_and_these_words() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/combinations.md");
    // A published crate is without the document.
    let Ok(document) = std::fs::read_to_string(path) else { return };
    let row = |(one, other, words, _): &Pair| format!("| {one} | {other} | {words} | `it pairs::refused` |");
    let mut rows: Vec<_> = PAIRS.iter().map(row).collect();
    rows.sort_unstable();
    rows.dedup();
    let mut listed: Vec<_> = document
        .lines()
        .filter(|line| line.ends_with("| `it pairs::refused` |"))
        .map(str::to_owned)
        .collect();
    listed.sort_unstable();
    assert_eq!(listed, rows);
}
