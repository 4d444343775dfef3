//! The monitor of `sterna relay --qmp`: its commands show and end sessions, and change the limit.
//!
//! [`COMMANDS`] lists what it answers, and [`EVENTS`] what it sends.

use std::sync::Arc;

use serde_json::{Map, Value, json};
use sterna_qmp::server::MemberKind::{Array, Boolean, Integer, List, Members, Number, String as Text};
use sterna_qmp::server::{CommandSpec, Context, EventSpec, MemberSpec};
use sterna_qmp::{EventBus, Handler, QmpError};
use sterna_relay::phase::Phase;
use sterna_relay::relay::{Figures, Notice};

use super::relays::Relays;
use crate::interrupts::Interrupts;

const fn required(
    name: &'static str,
    kind: sterna_qmp::server::MemberKind,
    about: &'static str,
) -> MemberSpec {
    MemberSpec::required(name, kind, about)
}

const fn optional(
    name: &'static str,
    kind: sterna_qmp::server::MemberKind,
    about: &'static str,
) -> MemberSpec {
    MemberSpec::optional(name, kind, about)
}

const SESSION: MemberSpec = required("session", Text, "The session, 16 hexadecimal digits.");

/// The figures of one session.
#[rustfmt::skip]
const FIGURES: &[MemberSpec] = &[
    SESSION,
    required("route", Text, "The route at the destination's relay."),
    required("role", Text, "`source` or `destination`: the side of this relay."),
    optional("peer", Text, "Address of the other relay. Absent before the first connection."),
    required("status", Text, "`running`; `waiting`: an operator has to look at the destination; `over`."),
    required("phase", Text, "`none`, `setup`, `ram`, `switchover`, `devices`, `ended`, `postcopy`, or `unread` for a stream that is relayed without phases."),
    required("round", Integer, "The RAM round, from 1; 0 before RAM."),
    required("age", Number, "Seconds since the session began."),
    optional("total-bytes", Integer, "Bytes of the guest's RAM, if the stream states them."),
    required("processed-bytes", Integer, "Bytes of all connections from the source's VMM that have passed."),
    optional("remaining-bytes", Integer, "Bytes of RAM that still have to pass: exact in the first round, an estimate later. Absent with multifd."),
    optional("dirty-rate", Integer, "Bytes of RAM per second that the guest wrote in the round before the last complete one."),
    required("rate", Integer, "Bytes per second from the source's VMM, over the last second."),
    optional("downtime", Number, "Seconds from the guest's stop to the destination's answer, as the stream shows both; it grows while it lasts."),
    required("downtime-over", Boolean, "Whether the downtime is complete."),
    required("compression-ratio", Number, "Bytes of connections for each byte that this relay sent for them."),
    required("answered-bytes", Integer, "Bytes of all connections to the source's VMM."),
    required("resent-bytes", Integer, "Bytes that this relay sent again after a carrier was lost."),
    required("carriers", Integer, "Carriers that are connected."),
    required("lost-carriers", Integer, "Carriers that were lost so far."),
    required("reconnections", Integer, "Carriers that replaced lost ones."),
    optional("lost-for", Number, "Seconds without any carrier. Absent while there is one."),
    required("flows", Integer, "Connections of VMMs that are open."),
    required("held-bytes", Integer, "Bytes that this relay holds in memory."),
];

/// Every command of the socket of `sterna relay`.
#[rustfmt::skip]
pub const COMMANDS: &[CommandSpec] = &[
    CommandSpec::new("query-relay", "Returns the limit and the open sessions with their figures.").returns(Members(&[
        required("listening", Array, "The addresses at which the relay listens."),
        required("limit", Integer, "Limit of all sessions together, in bytes per second; 0: none."),
        required("ending", Boolean, "Whether the relay begins no more sessions."),
        required("sessions", List(FIGURES), "The open sessions."),
    ])),
    CommandSpec::new("set-relay-limit", "Changes the limit of all sessions together while they run.").takes(&[
        required("limit", Integer, "Bytes per second; 0: no limit."),
    ]),
    CommandSpec::new("end-relay-session", "Ends a session as at the end of its reconnect window. One whose destination may have the guest \
                                           stays, and keeps its source waiting.").takes(&[SESSION]),
    CommandSpec::new("quit", "Begins no more sessions, and ends the relay when none is open, as SIGTERM does."),
];

const OPENED: EventSpec = EventSpec::new("RELAY_SESSION_OPENED", "A session began.")
    .with(&[SESSION, required("route", Text, "The route at the destination's relay.")]);
const PHASE: EventSpec = EventSpec::new("RELAY_PHASE", "The phase of a migration changed.").with(&[
    SESSION,
    required("phase", Text, "As in `query-relay`."),
    optional("round", Integer, "The RAM round, in the phase `ram`."),
]);
const CARRIER_LOST: EventSpec =
    EventSpec::new("RELAY_CARRIER_LOST", "A connection to the other relay is lost.").with(&[
        SESSION,
        optional("carrier", Integer, "Number of the connection. Absent if it was the last one."),
        required("reason", Text, "Why."),
    ]);
const RECONNECTED: EventSpec =
    EventSpec::new("RELAY_RECONNECTED", "A lost connection to the other relay was replaced.").with(&[
        SESSION,
        optional("carrier", Integer, "Number of the connection. Absent if there was no other one."),
        optional("after", Number, "Seconds without any connection."),
    ]);
const REFUSED: EventSpec = EventSpec::new("RELAY_REFUSED", "A connection or a stream was refused.")
    .with(&[optional("session", Text, "The session, if there is one."), required("reason", Text, "Why.")]);
const WAITING: EventSpec = EventSpec::new(
    "RELAY_SESSION_WAITING",
    "The source is kept waiting: an operator has to look at the destination.",
)
.with(&[SESSION, required("advice", Text, "Which side runs the guest, and what to do.")]);
const ENDED: EventSpec = EventSpec::new("RELAY_SESSION_ENDED", "A session ended.").with(&[
    SESSION,
    required("in-order", Boolean, "Whether all connections ended in order."),
    required("reason", Text, "How it ended."),
    required("figures", Members(FIGURES), "The figures at the end."),
]);

/// Every event of the socket of `sterna relay`.
pub const EVENTS: &[EventSpec] = &[OPENED, PHASE, CARRIER_LOST, RECONNECTED, REFUSED, WAITING, ENDED];

/// Sends the event for a notice. Never waits.
pub(super) fn emit(bus: &EventBus, notice: &Notice) {
    let (event, data) = match notice {
        Notice::Began { session, route } => {
            (&OPENED, json!({"session": session.to_string(), "route": route.to_string()}))
        }
        Notice::Phase { session, phase } => {
            let round = if let Phase::Ram { round } = phase { Some(*round) } else { None };
            (&PHASE, json!({"session": session.to_string(), "phase": phase.word(), "round": round}))
        }
        Notice::CarrierLost { session, carrier, why } => {
            (&CARRIER_LOST, json!({"session": session.to_string(), "carrier": carrier, "reason": why}))
        }
        Notice::Lost { session, why } => {
            (&CARRIER_LOST, json!({"session": session.to_string(), "reason": why}))
        }
        Notice::CarrierBack { session, carrier } => {
            (&RECONNECTED, json!({"session": session.to_string(), "carrier": carrier}))
        }
        Notice::Back { session, after } => {
            (&RECONNECTED, json!({"session": session.to_string(), "after": after.as_secs_f64()}))
        }
        Notice::Refused { session, why } => {
            (&REFUSED, json!({"session": session.map(|session| session.to_string()), "reason": why}))
        }
        Notice::Waiting { session, advice } => {
            (&WAITING, json!({"session": session.to_string(), "advice": advice}))
        }
        Notice::Ended { session, how, in_order, figures } => (
            &ENDED,
            json!({"session": session.to_string(), "in-order": in_order, "reason": how, "figures": value(figures)}),
        ),
        _ => return,
    };
    bus.emit(event, Some(without_null(data)));
}

fn without_null(mut data: Value) -> Value {
    if let Some(members) = data.as_object_mut() {
        members.retain(|_, value| !value.is_null());
    }
    data
}

fn value(figures: &Figures) -> Value {
    without_null(json!({
        "session": figures.session.to_string(),
        "route": figures.route.to_string(),
        "role": figures.role_word(),
        "peer": figures.peer,
        "status": figures.status.word(),
        "phase": figures.phase_word(),
        "round": figures.round,
        "age": figures.age.as_secs_f64(),
        "total-bytes": figures.ram_bytes,
        "processed-bytes": figures.processed_bytes,
        "remaining-bytes": figures.remaining_bytes,
        "dirty-rate": figures.dirty_rate,
        "rate": figures.rate,
        "downtime": figures.downtime.map(|time| time.as_secs_f64()),
        "downtime-over": figures.is_downtime_over,
        "compression-ratio": figures.compression_ratio(),
        "answered-bytes": figures.answered_bytes,
        "resent-bytes": figures.resent_bytes,
        "carriers": figures.carriers,
        "lost-carriers": figures.lost_carriers,
        "reconnections": figures.reconnections,
        "lost-for": figures.lost_for.map(|time| time.as_secs_f64()),
        "flows": figures.open_flows,
        "held-bytes": figures.held_bytes,
    }))
}

/// Executes the commands of the relay's monitor.
pub(super) struct Control {
    relays: Arc<Relays>,
    interrupts: Interrupts,
}

impl Control {
    pub(super) fn new(relays: Arc<Relays>, interrupts: Interrupts) -> Arc<Self> {
        Arc::new(Self { relays, interrupts })
    }

    fn query(&self) -> Value {
        let addresses: Vec<String> = self.relays.addresses().map(ToString::to_string).collect();
        json!({
            "listening": addresses,
            "limit": self.relays.limit.bytes_per_second(),
            "ending": self.relays.is_closing(),
            "sessions": self.relays.figures().iter().map(value).collect::<Vec<_>>(),
        })
    }

    fn set_limit(&self, arguments: &Map<String, Value>) -> Result<Value, QmpError> {
        let limit = arguments.get("limit").and_then(Value::as_u64);
        let limit = limit.ok_or_else(|| QmpError::expects("limit", "a number of bytes per second, or 0"))?;
        self.relays.limit.set(limit);
        Ok(json!({}))
    }

    fn end(&self, arguments: &Map<String, Value>) -> Result<Value, QmpError> {
        let session = arguments.get("session").and_then(Value::as_str).unwrap_or_default();
        match self.relays.end(session, "an operator has ended the session") {
            true => Ok(json!({})),
            false => Err(QmpError::generic(format!(
                "session '{session}' is not open here: `query-relay` names the open ones"
            ))),
        }
    }
}

impl Handler for Control {
    fn commands(&self) -> Vec<CommandSpec> {
        COMMANDS.to_vec()
    }

    fn events(&self) -> Vec<EventSpec> {
        EVENTS.to_vec()
    }

    fn execute(
        &self,
        command: &str,
        arguments: &Map<String, Value>,
        context: &mut Context,
    ) -> Result<Value, QmpError> {
        match command {
            "query-relay" => Ok(self.query()),
            "set-relay-limit" => self.set_limit(arguments),
            "end-relay-session" => self.end(arguments),
            "quit" => {
                let interrupts = self.interrupts.clone();
                context.after_reply(move || interrupts.add());
                Ok(json!({}))
            }
            _ => Err(QmpError::command_not_found(format!("The command {command} has not been found"))),
        }
    }
}
