//! A guest whose RAM is random bytes, and its migration over a link.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna::{Address, Arrival, Capabilities, Incoming, Migration, Outcome, Parameters};
use sterna_benches::Failure;
use sterna_guests::model::{Fill, Pattern};
use sterna_guests::process::{ProcessConfig, ProcessGuest};
use sterna_link::Link;

/// Pages that the guest writes per second.
const WRITES: u64 = 100;
const LOOK: Duration = Duration::from_millis(5);

/// A running migration, with its two guests.
pub struct Travel {
    pub migration: Migration,
    incoming: Incoming,
    there: Arc<ProcessGuest>,
}

impl Travel {
    /// Starts a migration from the near host to the far one.
    pub fn begin(link: &Link, ram_bytes: u64, parameters: &Parameters) -> Result<Self, Failure> {
        let capabilities =
            Capabilities { postcopy_ram: true, postcopy_preempt: true, ..Capabilities::default() };
        let config = ProcessConfig {
            blocks: vec![("ram".to_owned(), ram_bytes)],
            fill: Fill::Random(1),
            pattern: Pattern::Random,
            rate: WRITES,
            workers: 1,
            ..ProcessConfig::default()
        };
        let here = ProcessGuest::boot(config.clone()).map_err(said)?;
        let there = ProcessGuest::waiting(config).map_err(said)?;
        here.cont().map_err(said)?;
        let at: Address = format!("tcp:{}:0", link.far().address()).parse().map_err(said)?;
        let incoming = link.far().run(|| {
            Incoming::listen(Arc::clone(&there) as _, &at, parameters.clone(), capabilities, Arc::new(()))
        });
        let incoming = incoming.map_err(said)?;
        let to = incoming.address();
        let migration = link
            .near()
            .run(|| Migration::start(here as _, &to, parameters.clone(), capabilities, Arc::new(())))
            .map_err(said)?;
        Ok(Self { migration, incoming, there })
    }

    /// Waits until the condition is true or the migration is over.
    pub fn until(&self, limit: Duration, is_so: impl Fn() -> bool) -> Result<(), Failure> {
        let until = Instant::now() + limit;
        while !is_so() && self.migration.outcome().is_none() {
            if Instant::now() > until {
                return Err(format!("it makes no progress: {:?}", self.migration.status()));
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Waits for the end, and checks that the guest is whole at the far host.
    pub fn end(self) -> Result<Migration, Failure> {
        match (self.migration.wait(), self.incoming.wait()) {
            (Outcome::Completed, Arrival::Completed(_)) => {}
            other => return Err(format!("the migration has failed: {other:?}")),
        }
        self.there.pause().map_err(said)?;
        let verdict = self.there.check().map_err(said)?;
        if !verdict.is_consistent() {
            return Err(format!("the guest's memory is wrong: {verdict:?}"));
        }
        Ok(self.migration)
    }
}

pub fn said(error: impl std::fmt::Display) -> Failure {
    error.to_string()
}
