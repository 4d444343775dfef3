//! A guest and the machine that it moves to, both of one side. Also the measurements of the move.

use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use sterna_benches::Failure;
use sterna_benches::machines::{Lab, Role, Side};
use sterna_benches::peer::Peer;
use sterna_benches::words::{Gaps, GuestWords};
use sterna_interop::Guest;

/// Time limit of a complete move.
const PATIENCE: Duration = Duration::from_secs(180);
/// Time limit until a migration can be switched.
const SETUP: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(2);
const PIECE_BYTES: u64 = 1 << 20;
/// Bytes at the end of RAM, where firmware has its tables.
const FIRMWARE_BYTES: u64 = 16 << 20;
/// Address of the first page that the guest sweeps.
const SWEPT_FROM: u64 = 1 << 20;

/// Two machines of one side.
pub(crate) struct Pair {
    pub(crate) source: Peer,
    pub(crate) destination: Peer,
    pub(crate) words: GuestWords,
}

/// Measurements of a guest that has moved.
pub(crate) struct Moved {
    /// Times of the machines' events, by the host's clock.
    stopped: Duration,
    resumed: Duration,
    completed: Duration,
    /// The guest's counts when it stopped, and when it had all of its memory; and the time of the latter
    /// reading.
    at_stop: Gaps,
    at_end: Gaps,
    read: Duration,
    /// The sides' answers to `query-migrate`.
    pub(crate) source: Value,
    pub(crate) destination: Value,
}

impl Pair {
    /// A guest that writes half of its memory, in pages that are far apart. The other half is random bytes.
    pub(crate) fn begin(lab: &Lab, side: Side, bytes: u64, channels: u8) -> Result<Self, Failure> {
        let guest = (Guest::Scattered, bytes);
        let mut source = lab.start_guest(side, Role::Source, bytes, guest)?;
        let mut destination = lab.start_guest(side, Role::FreshDestination, bytes, guest)?;
        set(&mut source, channels, &[])?;
        set(&mut destination, channels, &["postcopy-blocktime"])?;
        destination.execute("cont", Value::Null)?;
        source.execute("cont", Value::Null)?;
        // After its first pass, every page that the guest sweeps has content.
        source.wait_for_ticks(1)?;
        fill(&source, bytes)?;
        let words = GuestWords::of_process(source.id())?;
        words.clear_gaps()?;
        Ok(Self { source, destination, words })
    }

    /// Starts a precopy.
    pub(crate) fn migrate(&mut self) -> Result<(), Failure> {
        let address = self.destination.listen()?;
        self.source.forget_events()?;
        self.destination.forget_events()?;
        self.source.execute("migrate", json!({ "uri": address })).map(drop)
    }

    /// Whether the migration ends within `limit`.
    pub(crate) fn ends_within(&mut self, limit: Duration) -> Result<bool, Failure> {
        let until = Instant::now() + limit;
        while Instant::now() < until {
            let query = self.source.execute("query-migrate", Value::Null)?;
            match query["status"].as_str() {
                Some("completed") => return Ok(true),
                Some("failed" | "cancelled") => return Err(format!("the migration has ended: {query}")),
                _ => std::thread::sleep(LOOK * 10),
            }
        }
        Ok(false)
    }

    /// Switches to postcopy, and waits until the guest has all of its memory.
    pub(crate) fn switch(&mut self) -> Result<Moved, Failure> {
        let until = Instant::now() + SETUP;
        while let Err(why) = self.source.execute("migrate-start-postcopy", Value::Null) {
            // QEMU refuses the switch until the migration has started.
            if Instant::now() > until {
                return Err(why);
            }
            std::thread::sleep(LOOK);
        }
        self.watch()
    }

    fn watch(&mut self) -> Result<Moved, Failure> {
        let there = GuestWords::of_process(self.destination.id())?;
        let (mut stopped, mut resumed, mut is_over) = (None, None, false);
        let (mut at_stop, mut end) = (Gaps::default(), None);
        let until = Instant::now() + PATIENCE;
        while end.is_none() || !is_over {
            if Instant::now() > until {
                let query = self.source.execute("query-migrate", Value::Null)?;
                return Err(format!("postcopy does not end: {query}"));
            }
            while let Some(event) = self.source.next_event(Duration::ZERO)? {
                if event.name == "STOP" {
                    stopped = Some(event.timestamp);
                    at_stop = self.words.gaps()?;
                }
                is_over |= is_completed(&event.name, &event.data, "source")?;
            }
            let Some(event) = self.destination.next_event(LOOK)? else { continue };
            if event.name == "RESUME" {
                resumed = Some(event.timestamp);
            }
            if is_completed(&event.name, &event.data, "destination")? {
                end = Some((event.timestamp, there.gaps()?, now()));
            }
        }
        let (completed, at_end, read) = end.ok_or("postcopy does not end")?;
        Ok(Moved {
            stopped: stopped.ok_or("the source did not say that its guest stopped")?,
            resumed: resumed.ok_or("the destination did not say that its guest runs")?,
            completed,
            at_stop,
            at_end,
            read,
            source: self.source.execute("query-migrate", Value::Null)?,
            destination: self.destination.execute("query-migrate", Value::Null)?,
        })
    }
}

impl Moved {
    /// Seconds in which the guest ran on neither side.
    pub(crate) fn downtime(&self) -> f64 {
        self.resumed.saturating_sub(self.stopped).as_secs_f64()
    }

    /// Seconds from the guest's stop until the last page arrived.
    pub(crate) fn until_last_page(&self) -> f64 {
        self.completed.saturating_sub(self.stopped).as_secs_f64()
    }

    /// The guest's counts from its stop until it had all of its memory.
    pub(crate) fn gaps(&self) -> Gaps {
        self.at_end.since(&self.at_stop)
    }

    /// Pages per second that the guest wrote in that time.
    pub(crate) fn pages_per_second(&self) -> f64 {
        self.gaps().pages() as f64 / self.read.saturating_sub(self.stopped).as_secs_f64().max(1e-9)
    }

    /// A number in `ram` of the source's `query-migrate`.
    pub(crate) fn counted(&self, name: &str) -> Result<u64, Failure> {
        self.source["ram"][name].as_u64().ok_or_else(|| format!("{name} is missing: {}", self.source))
    }
}

fn set(peer: &mut Peer, channels: u8, more: &[&str]) -> Result<(), Failure> {
    let mut on = vec!["events", "postcopy-ram", "postcopy-preempt"];
    on.extend((channels > 0).then_some("multifd"));
    on.extend(more);
    let on: Vec<Value> = on.iter().map(|name| json!({"capability": name, "state": true})).collect();
    peer.execute("migrate-set-capabilities", json!({ "capabilities": on }))?;
    peer.execute("migrate-set-parameters", json!({"max-bandwidth": 0, "multifd-channels": channels.max(1)}))?;
    peer.forget_events()
}

/// Fills the memory that the guest does not sweep with random bytes.
fn fill(peer: &Peer, bytes: u64) -> Result<(), Failure> {
    let ram = peer.ram()?.into_iter().next().ok_or("a machine without memory files")?;
    let mut random = fastrand::Rng::with_seed(1);
    let mut piece = vec![0; PIECE_BYTES as usize];
    for at in (SWEPT_FROM + bytes / 2..bytes - FIRMWARE_BYTES).step_by(PIECE_BYTES as usize) {
        random.fill(&mut piece);
        ram.write_all_at(&piece, at).map_err(|error| format!("guest RAM: {error}"))?;
    }
    Ok(())
}

fn is_completed(event: &str, data: &Value, side: &str) -> Result<bool, Failure> {
    match data["status"].as_str().filter(|_| event == "MIGRATION") {
        Some("completed") => Ok(true),
        Some(status @ ("failed" | "cancelled" | "postcopy-paused")) => Err(format!("the {side} is {status}")),
        _ => Ok(false),
    }
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
