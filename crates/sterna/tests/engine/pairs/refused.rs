//! Features that exclude each other: refused before any resource is released.

use std::sync::Arc;
use std::time::Duration;

use sterna::ram::{Custody, DirtySource, GuestRam};
use sterna::rules::{self, Feature, Features, RULES, Relation};
use sterna::{
    Address, Capabilities, Compression, Device, Hook, Incoming, Migration, MigrationMode, NonConvergence,
    Parameters, RunState, SourceVm, TargetVm, TlsEndpoint, Vm, VmError,
};
use sterna_guests::process::ProcessGuest;

use crate::common;
use crate::support::pairs::{banks, with_tls};
use crate::support::{TestVm, small};

/// The side that refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Source,
    Destination,
}

/// Settings and devices of a refused migration.
struct Settings {
    side: Side,
    address: &'static str,
    params: Parameters,
    capabilities: Capabilities,
    /// Whether the VM has a device with a stream.
    has_stream: bool,
    /// Whether the VM has a device in another process.
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

/// An entry of docs/combinations.md: both features, the text of the refusal, and a function that sets them.
type Pair = (&'static str, &'static str, &'static str, fn(&mut Settings));

const PAIRS: &[Pair] = &[
    ("postcopy", "file", "postcopy_ram cannot be combined with a file", |s| {
        s.postcopy();
        s.file();
    }),
    ("postcopy", "file", "postcopy_ram cannot be combined with a file", |s| {
        s.side = Side::Destination;
        s.postcopy();
        s.file();
    }),
    ("postcopy", "mapped-ram", "postcopy_ram cannot be combined with a file", |s| {
        s.postcopy();
        s.file();
        s.capabilities.mapped_ram = true;
    }),
    ("postcopy", "RDMA", "postcopy_ram cannot be combined with rdma:", |s| {
        s.postcopy();
        s.rdma();
    }),
    ("postcopy", "RDMA", "postcopy_ram cannot be combined with rdma:", |s| {
        s.side = Side::Destination;
        s.postcopy();
        s.rdma();
    }),
    ("postcopy", "same-host", "postcopy_ram cannot be combined with mode cpr-transfer", |s| {
        s.postcopy();
        s.same_host();
    }),
    ("postcopy", "vhost-user", "needs all of the guest's memory from the start", |s| {
        s.postcopy();
        s.shares_ram = true;
    }),
    ("postcopy", "vfio-user", "needs all of the guest's memory from the start", |s| {
        s.side = Side::Destination;
        s.postcopy();
        s.shares_ram = true;
    }),
    ("precopy", "xbzrle", "xbzrle is supported only in the checkpoints of a protected guest", |s| {
        s.capabilities.xbzrle = true
    }),
    ("postcopy", "xbzrle", "xbzrle is supported only in the checkpoints of a protected guest", |s| {
        s.postcopy();
        s.capabilities.xbzrle = true;
    }),
    ("xbzrle", "device streams", "xbzrle is supported only in the checkpoints of a protected guest", |s| {
        s.capabilities.xbzrle = true;
        s.has_stream = true;
    }),
    ("xbzrle", "vhost-user", "xbzrle is supported only in the checkpoints of a protected guest", |s| {
        s.capabilities.xbzrle = true;
        s.shares_ram = true;
    }),
    ("xbzrle", "vfio-user", "xbzrle is supported only in the checkpoints of a protected guest", |s| {
        s.capabilities.xbzrle = true;
        s.shares_ram = true;
    }),
    ("xbzrle", "file", "xbzrle is supported only in the checkpoints of a protected guest", |s| {
        s.capabilities.xbzrle = true;
        s.file();
    }),
    ("xbzrle", "RDMA", "xbzrle is supported only in the checkpoints of a protected guest", |s| {
        s.capabilities.xbzrle = true;
        s.rdma();
    }),
    (
        "xbzrle",
        "pause-before-switchover",
        "xbzrle is supported only in the checkpoints of a protected guest",
        |s| {
            (s.capabilities.xbzrle, s.capabilities.pause_before_switchover) = (true, true);
        },
    ),
    ("same-host", "xbzrle", "cannot be combined with xbzrle", |s| {
        s.same_host();
        s.capabilities.xbzrle = true;
    }),
    ("same-host", "TLS", "cannot be combined with tls", |s| {
        s.same_host();
        s.tls();
    }),
    ("same-host", "zstd, zlib", "cannot be combined with multifd_compression", |s| {
        s.same_host();
        s.zstd();
    }),
    ("same-host", "auto-converge", "cannot be combined with auto_converge", |s| {
        s.same_host();
        s.capabilities.auto_converge = true;
    }),
    ("same-host", "dirty-limit", "cannot be combined with dirty_limit", |s| {
        s.same_host();
        s.capabilities.dirty_limit = true;
    }),
    ("same-host", "file", "which only a Unix socket can transfer", |s| {
        s.same_host();
        s.file();
    }),
    ("same-host", "mapped-ram", "mapped_ram needs a file", |s| {
        s.same_host();
        s.capabilities.mapped_ram = true;
    }),
    ("same-host", "RDMA", "which only a Unix socket can transfer", |s| {
        s.same_host();
        s.rdma();
    }),
    ("same-host", "vfio-user", "cannot follow it into another process", |s| {
        s.same_host();
        s.shares_ram = true;
    }),
    ("multifd", "file", "a file with a stream is one channel", |s| {
        s.file();
        s.capabilities.multifd = true;
    }),
    ("zstd, zlib", "file", "a file with a stream is one channel", |s| {
        s.file();
        s.zstd();
    }),
    ("zstd, zlib", "mapped-ram", "mapped_ram does not support compressed pages", |s| {
        s.file();
        s.zstd();
        s.capabilities.mapped_ram = true;
    }),
    ("zstd, zlib", "RDMA", "rdma: does not support compressed pages", |s| {
        s.rdma();
        s.zstd();
    }),
    ("zstd, zlib", "RDMA", "rdma: does not support compressed pages", |s| {
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
    ("TLS", "RDMA", "rdma: does not support TLS", |s| {
        s.rdma();
        s.tls();
    }),
    ("TLS", "RDMA", "rdma: does not support TLS", |s| {
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
    fn prepare_start(&self) -> Result<(), VmError> {
        self.0.prepare_start()
    }
    fn start(&self) -> Result<(), VmError> {
        self.0.start()
    }
    fn reset(&self) {
        self.0.reset();
    }
}

/// The text of the refusal. No migration has begun.
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

/// Sets a feature as a user does. Returns false if settings alone cannot set it.
fn set(feature: Feature, is_on: bool, settings: &mut Settings) -> bool {
    match feature {
        Feature::File | Feature::StreamFile if is_on => settings.file(),
        Feature::Rdma if is_on => settings.rdma(),
        Feature::UnixSocket if is_on => settings.address = "unix:/nowhere",
        Feature::File | Feature::StreamFile | Feature::Rdma | Feature::UnixSocket => {}
        Feature::Multifd => settings.capabilities.multifd = is_on,
        Feature::Compression if is_on => settings.zstd(),
        Feature::MappedRam => settings.capabilities.mapped_ram = is_on,
        Feature::Tls if is_on => settings.tls(),
        Feature::ReturnPath => settings.capabilities.return_path = is_on,
        Feature::SwitchoverAck => settings.capabilities.switchover_ack = is_on,
        Feature::AutoConverge => settings.capabilities.auto_converge = is_on,
        Feature::DirtyLimit => settings.capabilities.dirty_limit = is_on,
        Feature::Xbzrle => settings.capabilities.xbzrle = is_on,
        // Without the address, which is a feature of its own.
        Feature::SameHost if is_on => settings.params.mode = MigrationMode::CprTransfer,
        Feature::Postcopy => settings.capabilities.postcopy_ram = is_on,
        Feature::Preempt => settings.capabilities.postcopy_preempt = is_on,
        Feature::Blocktime => settings.capabilities.postcopy_blocktime = is_on,
        Feature::Reconnect if is_on => settings.params.reconnect_window = Duration::from_secs(1),
        Feature::PostcopyAtStandstill if is_on => settings.params.non_convergence = NonConvergence::Postcopy,
        Feature::PostcopyAfter if is_on => settings.params.postcopy_after = Duration::from_secs(1),
        Feature::PostcopyAfterRounds if is_on => settings.params.postcopy_after_rounds = 1,
        // No other feature needs it, and no case here has it.
        Feature::Protection if !is_on => {}
        _ => return false,
    }
    true
}

#[test]
fn every_rule_is_asked_on_the_sides_that_it_binds() {
    let mut asked = 0;
    for rule in RULES {
        for side in [Side::Source, Side::Destination] {
            let mut settings = Settings { side, ..Settings::new() };
            let can_be_set = set(rule.one, true, &mut settings)
                & set(rule.other, rule.relation == Relation::Excludes, &mut settings);
            if !can_be_set {
                continue;
            }
            let address: Address = settings.address.parse().unwrap();
            let features = Features::of(&address, &settings.params, &settings.capabilities);
            let of_rules = match side {
                Side::Source => rules::Side::Source,
                Side::Destination => rules::Side::Destination,
            };
            if side == Side::Destination && !rule.binds_destination {
                continue;
            }
            assert!(rule.is_broken(features, of_rules), "{rule:?} with {features:?}");
            let why = rules::check(features, of_rules).unwrap_err().to_string();
            let refusal = refusal(&settings).unwrap_or_else(|| panic!("{rule:?} is not asked on {side:?}"));
            assert!(refusal.contains(&why), "{rule:?} on {side:?}: {refusal}, not {why}");
            asked += 1;
        }
    }
    assert!(asked >= 30, "{asked} rules were tried");
}

/// Rows of the rules, as docs/combinations.md contains them between the two marks.
fn rows_of_rules() -> String {
    let mut rows =
        String::from("| feature | | feature | asked by | the refusal |\n| --- | --- | --- | --- | --- |\n");
    for rule in RULES {
        let relation = match rule.relation {
            Relation::Excludes => "excludes",
            Relation::Needs => "needs",
        };
        let sides = if rule.binds_destination { "both sides" } else { "the source" };
        let (one, other, why) = (rule.one.name(), rule.other.name(), &rule.why);
        rows += &format!("| {one} | {relation} | {other} | {sides} | {why} |\n");
    }
    rows
}

/// `STERNA_BLESS=1` writes the rows instead.
#[test]
fn document_has_every_rule() {
    const BEGIN: &str =
        "<!-- rules: written by `STERNA_BLESS=1 cargo test -p sterna --test engine pairs::refused` -->\n";
    const END: &str = "<!-- end of rules -->";
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/combinations.md");
    // A published crate does not contain the document.
    let Ok(document) = std::fs::read_to_string(path) else { return };
    let (before, rest) = document.split_once(BEGIN).expect("the mark before the rules");
    let (listed, after) = rest.split_once(END).expect("the mark after the rules");
    let rows = rows_of_rules();
    if std::env::var_os("STERNA_BLESS").is_some() {
        std::fs::write(path, format!("{before}{BEGIN}{rows}{END}{after}")).unwrap();
        return;
    }
    assert_eq!(listed, rows, "run this test with STERNA_BLESS=1");
}

/// The document's rows that name this test must be exactly the rows of this table.
#[test]
fn document_has_these_pairs_and_these_words() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/combinations.md");
    // A published crate does not contain the document.
    let Ok(document) = std::fs::read_to_string(path) else { return };
    let row =
        |(one, other, words, _): &Pair| format!("| {one} | {other} | {words} | `engine pairs::refused` |");
    let mut rows: Vec<_> = PAIRS.iter().map(row).collect();
    rows.sort_unstable();
    rows.dedup();
    let mut listed: Vec<_> = document
        .lines()
        .filter(|line| line.ends_with("| `engine pairs::refused` |"))
        .map(str::to_owned)
        .collect();
    listed.sort_unstable();
    assert_eq!(listed, rows);
}
