//! `sterna relay`: carries the migrations of other VMMs over connections that may break.

mod arguments;
mod book;
mod control;
mod ending;
mod relays;
mod show;

use std::sync::Arc;
use std::time::Duration;

use sterna_qmp::{EventBus, Server};
use sterna_relay::relay::Notices;

use crate::exit::{Done, Status, Stop};
use crate::interrupts::Interrupts;
use crate::metrics::{self, MetricsServer};
use crate::service::{Listeners, Notifier};
use crate::terminal;
pub(super) use arguments::mode;
pub use arguments::{Arguments, Kind};
use book::Book;
use control::Control;
pub use control::{COMMANDS, EVENTS};
use ending::Ending;
use relays::Relays;
pub(super) use relays::{secret, split_route, stop};
use show::Bars;

/// Interval between two looks at the sessions.
const LOOK: Duration = Duration::from_millis(100);

/// Relays until it is interrupted.
pub fn execute(arguments: &Arguments) -> Done {
    let interrupts = Interrupts::catch()?;
    let notifier = Notifier::from_environment();
    let mut listeners = Listeners::from_environment()?;
    let (bus, bars) = (EventBus::new(), Arc::new(Bars::new(arguments.shown)));
    let book = Arc::new(Book::new(arguments.report.as_deref())?);
    let notices = {
        let (bus, bars, book) = (bus.clone(), Arc::clone(&bars), Arc::clone(&book));
        Notices::new(move |notice| {
            control::emit(&bus, &notice);
            bars.note(&format!("sterna: {notice}"));
            book.note(notice);
        })
    };
    let relays = Arc::new(Relays::start(arguments, &mut listeners, &notices)?);
    let _metrics = {
        let (relays, book) = (Arc::clone(&relays), Arc::clone(&book));
        let page = move || {
            let sessions = [relays.figures(), book.ended()].concat();
            metrics::of_relay(&sessions, book.sums(relays.limit.bytes_per_second()))
        };
        MetricsServer::start_if(arguments.metrics.as_deref(), page)?
    };
    let control = Control::new(Arc::clone(&relays), interrupts.clone());
    let bind = |endpoint| Server::bind(endpoint, control.clone(), bus.clone());
    let _server = arguments.qmp.as_ref().map(bind).transpose();
    let _server = _server.map_err(|error| Stop::failed(format!("--qmp: {error}")))?;
    for address in relays.addresses() {
        terminal::note(&format!("sterna: listening at {address}"));
    }
    let mut ending = Ending::new(arguments.drain.map(Duration::from_secs), &notifier);
    notifier.ready(&ending::status(&relays.figures()));
    let mut seen = 0;
    let done = loop {
        interrupts.sleep(LOOK, seen);
        let figures = relays.figures();
        book.look(&figures);
        bars.show(&figures);
        if interrupts.count() > seen {
            seen = interrupts.count();
            ending.interrupted(seen, &relays, &bars);
        }
        ending.look(&figures, &relays, &bars);
        if seen > 0 && relays.open() == 0 {
            break Ok(Status::Done);
        }
        if seen > 2 {
            break Err(Stop::with(
                Status::Undecided,
                "ended while a session was open. Its source may have been waiting: look at both VMMs before you resume a guest",
            ));
        }
    };
    bars.end();
    book.finish("the relay has ended");
    done
}
