//! Translates the machine's states into an operator's terms: limits, statuses, forms of acknowledgement.

use sterna_proto::source::{State, SwitchoverAck};

use crate::events::Status;
use crate::limits::machine_limits;
use crate::params::{Capabilities, WaitLimits};

/// Channels that the source connects in parallel.
pub(super) const CONNECTED_AT_ONCE: usize = 32;

/// Which form of `switchover-ack` the machine type's version asks for (specs/stream.md §5.3).
pub(super) fn ack_form(capabilities: &Capabilities, machine_type: &str) -> SwitchoverAck {
    if !capabilities.switchover_ack {
        return SwitchoverAck::Off;
    }
    if crate::machine_type::acknowledges_in_old_form(machine_type) {
        SwitchoverAck::Legacy
    } else {
        SwitchoverAck::Modern
    }
}

/// The time limit of `state`.
pub(super) fn limit_of(state: State, limits: &WaitLimits) -> std::time::Duration {
    let limits = machine_limits(limits);
    match state {
        State::Setup
        | State::Identifying
        | State::Configuring
        | State::Comparing
        | State::PostcopyRecover => limits.setup,
        State::PostcopyPaused => limits.reconnect,
        State::Stopping | State::Releasing => limits.stop,
        State::Switchover => limits.switchover,
        State::Preparing => limits.prepare,
        State::Committing => limits.commit,
        _ => limits.acknowledge,
    }
}

/// The status that an operator sees in `state`.
pub(super) fn status_of(state: State) -> Status {
    match state {
        State::Setup | State::Identifying | State::Configuring | State::Comparing => Status::Setup,
        State::Active | State::Stopping | State::Suspending | State::Reconnecting => Status::Active,
        State::PreSwitchover => Status::PreSwitchover,
        State::Releasing | State::Switchover | State::Preparing | State::Committing | State::AwaitingAck => {
            Status::Device
        }
        State::Seeding => Status::Device,
        State::Postcopy => Status::PostcopyActive,
        State::PostcopyPaused => Status::PostcopyPaused,
        State::PostcopyRecover => Status::PostcopyRecover,
        State::Protected => Status::Colo,
        State::Undecided => Status::Undecided,
        State::Cancelling => Status::Cancelling,
        State::Failing => Status::Failing,
        State::Completed => Status::Completed,
        State::Cancelled => Status::Cancelled,
        State::Held | State::Failed => Status::Failed,
    }
}
