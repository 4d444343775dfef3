//! One side of a case: its VM, its end of the migration, and the marks that it reports.

use std::path::Path;
use std::sync::Arc;

use sterna::ram::{Backing, RamBlock};
use sterna::{Address, Event, Incoming, Migration, SourceVm, TargetVm, TlsEndpoint};
use sterna_guests::ProcessGuest;

use super::case::Case;
use super::certificates;
use super::plants::{Plant, Planted};
use crate::bank::Bank;
use crate::ledger::Ledger;
use crate::stage::Stage;
use crate::staged::Staged;
use crate::stop::Side;

/// The source of a case.
pub(super) struct Here {
    pub(super) vm: Arc<Staged>,
    pub(super) migration: Migration,
}

/// The destination of a case.
pub(super) struct There {
    pub(super) vm: Arc<Staged>,
    pub(super) incoming: Incoming,
}

/// The mark of an event that a case may wait for.
fn mark(event: &Event) -> Option<String> {
    Some(match event {
        Event::Status(status) => status.to_string(),
        Event::Round(_) => "round".into(),
        Event::Stopped => "stopped".into(),
        Event::Resumed => "resumed".into(),
        Event::Prepared => "prepared".into(),
        Event::Committed => "committed".into(),
        Event::ConnectionLost { .. } => "lost".into(),
        Event::Reconnected { .. } => "reconnected".into(),
        _ => return None,
    })
}

/// Whether a mark is a status.
pub(super) fn is_status(mark: &str) -> bool {
    !["round", "stopped", "resumed", "prepared", "committed", "lost", "reconnected"].contains(&mark)
}

impl Here {
    /// Boots a guest and migrates it to `to`. `told` is called with each mark.
    pub(super) fn begin(
        case: &Case,
        to: &Address,
        certificates: &Path,
        ledger: &Arc<Ledger>,
        told: impl Fn(&str) + Send + Sync + 'static,
    ) -> Result<Self, String> {
        let guest = ProcessGuest::boot(case.guest.clone()).map_err(|error| error.to_string())?;
        guest.cont().map_err(|error| error.to_string())?;
        let vm = staged(guest, Bank::all(&case.banks, true)?, ledger, Side::Source);
        Self::of(case, vm, to, certificates, told)
    }

    /// Migrates a guest that already exists.
    pub(super) fn of(
        case: &Case,
        vm: Arc<Staged>,
        to: &Address,
        certificates: &Path,
        told: impl Fn(&str) + Send + Sync + 'static,
    ) -> Result<Self, String> {
        let (mut params, capabilities) = case.settings();
        if case.tls {
            params.tls = Some(certificates::of(certificates, TlsEndpoint::Client)?);
        }
        let planted = case.plant.map(|plant| Planted::new(&vm, plant));
        let observed = planted.clone();
        let observer = move |event: &Event| {
            if let Some(mark) = mark(event) {
                if let Some(planted) = &observed {
                    planted.told(&mark);
                }
                told(&mark);
            }
        };
        let of_engine = match planted {
            Some(planted) => planted as Arc<dyn SourceVm>,
            None => Arc::clone(&vm) as Arc<dyn SourceVm>,
        };
        let migration = Migration::start(of_engine, to, params, capabilities, Arc::new(observer))
            .map_err(|error| format!("starting: {error}"))?;
        Ok(Self { vm, migration })
    }
}

impl There {
    /// Makes a destination and listens. `told` is called with each mark.
    pub(super) fn begin(
        case: &Case,
        certificates: &Path,
        ledger: &Arc<Ledger>,
        told: impl Fn(&str) + Send + Sync + 'static,
    ) -> Result<Self, String> {
        let guest = ProcessGuest::waiting(case.guest.clone()).map_err(|error| error.to_string())?;
        let vm = staged(guest, Bank::all(&case.banks, false)?, ledger, Side::Destination);
        let (mut params, capabilities) = case.settings();
        if case.tls {
            params.tls = Some(certificates::of(certificates, TlsEndpoint::Server)?);
        }
        let plant = case.plant;
        let observer = move |event: &Event| {
            if let Some(mark) = mark(event) {
                match plant {
                    Some(Plant::Descriptor) if mark == "completed" => {
                        std::mem::forget(std::fs::File::open("/dev/null"));
                    }
                    Some(Plant::Mapping) if mark == "completed" => {
                        std::mem::forget(RamBlock::new("left", 1 << 20, Backing::Anonymous));
                    }
                    _ => {}
                }
                told(&mark);
            }
        };
        let target = Arc::clone(&vm) as Arc<dyn TargetVm>;
        let incoming = Incoming::listen(target, &anywhere(), params, capabilities, Arc::new(observer))
            .map_err(|error| format!("listening: {error}"))?;
        Ok(Self { vm, incoming })
    }
}

/// Makes the VM of a side from `guest` and `banks`.
pub(super) fn staged(
    guest: Arc<ProcessGuest>,
    banks: Vec<Arc<Bank>>,
    ledger: &Arc<Ledger>,
    side: Side,
) -> Arc<Staged> {
    // These cases have no stops, so the stage stops nothing.
    Staged::new(guest, banks, Arc::new(Stage::default()), Arc::clone(ledger), side)
}

/// A port of the loopback that the kernel chooses.
pub(super) fn anywhere() -> Address {
    Address::Tcp { host: "127.0.0.1".into(), port: 0 }
}
