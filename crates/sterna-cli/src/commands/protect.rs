//! `sterna protect`: protects the guest of an unmodified QEMU or of a Sterna VM with a standby.
//! The command runs until an operator or a failure ends the protection.

mod checkpoints;
mod control;
mod disks;
mod json;
pub(in crate::commands) mod own;
mod show;
mod words;

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna::Address;
use sterna_arbiter::{DEFAULT_LIMIT, Operator, Role, Spec};
use sterna_drive::protect::{ProtectRequest, ProtectedDisk, ProtectionEnd, QemuProtection};
use sterna_qmp::Endpoint;
use sterna_standby::machines::primary::{Because, Cause, Outcome};
use sterna_standby::{Claims, Protection, Secret, Terms, new_protection};
use sterna_transport::{Tls, TlsEndpoint};

pub use control::COMMANDS;

use super::{pair, peer};
use crate::board::Board;
use crate::exit::{Done, Status, Stop};
use crate::interrupts::{Interrupts, until_interrupted};
use crate::metrics::{self, MetricsServer};
use crate::monitor::Monitor;
use crate::protection_record::{GuestAt, Look, Recorder};
use crate::record::Report;
use crate::{claims, secret, terminal, tls, units};
use control::Control;

/// Interval between two lines of output.
const LINE: Duration = Duration::from_secs(1);
/// How long this command waits after QEMU's exit, so that the standby can learn of it.
const LAST_WORD: Duration = Duration::from_secs(3);
/// Interval between two queries of the state.
const LOOK: Duration = Duration::from_millis(20);

/// Primary, standby, and settings of the protection.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Sterna VM: the VM protects its guest itself, with the arbiter, the secret and the lease of its `sterna run`. This command sets up \
both sides and shows the progress.

QEMU 11: this command must run as long as the guest is protected, because the checkpoints and all packets of the guest's network \
cards pass through it. A packet leaves this host only after the standby has stored the checkpoint that contains the state that sent \
it. Ctrl-C ends the protection: the standby discards the checkpoint, and the guest continues to run here.

When primary and standby cannot reach each other, the arbiter decides which of them runs the guest. Both sides must use the same \
arbiter: etcd:URL[,URL...][,OPTION=VALUE...], file:DIR, exec:COMMAND, or ask (an operator decides with `sterna decide`).")]
pub struct Arguments {
    /// QMP socket of the QEMU 11 or Sterna VM that runs the guest: unix:PATH, a path, or tcp:HOST:PORT
    pub socket: Endpoint,
    /// Address at which the standby listens: tcp:HOST:PORT or unix:PATH
    #[arg(value_parser = super::migrate::address)]
    pub standby: String,
    /// Only for a Sterna VM: QMP socket of the standby, a Sterna VM that was started with `sterna run --incoming
    /// defer`. This command sets it up, too
    #[arg(long, value_name = "SOCKET")]
    pub standby_qmp: Option<Endpoint>,
    /// Arbiter, which decides which side runs the guest when primary and standby cannot reach each other (see below)
    #[arg(long, value_name = "SPEC", default_value = "ask")]
    pub arbiter: Spec,
    /// Interval between two checkpoints, in milliseconds (at least 10)
    #[arg(long, value_name = "MS", default_value_t = 50, value_parser = clap::value_parser!(u32).range(10..))]
    pub checkpoint_delay: u32,
    /// Number of multifd channels, the same as at the standby [default: only the main channel]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    pub channels: Option<u8>,
    /// How long the guest may run after the last heartbeat that the standby answered was sent
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = units::parse_time)]
    pub lease: Duration,
    /// File with the secret that primary and standby share: 32 bytes, or 64 hexadecimal digits
    #[arg(long, value_name = "FILE")]
    pub secret: Option<PathBuf>,
    /// Address at which the standby accepts heartbeats, if it differs from STANDBY
    #[arg(long, value_name = "ADDRESS", value_parser = super::migrate::address)]
    pub contact: Option<String>,
    /// Number of this protection of the guest, for the arbiter. Use a number that the arbiter has not decided yet
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    pub generation: u64,
    /// Migration parameter under QEMU's name, set while the protection runs
    #[arg(long, value_name = "NAME=VALUE", value_parser = pair)]
    pub set: Vec<(String, String)>,
    /// Use TLS with the certificates in this directory (QEMU's file names)
    #[arg(long, value_name = "DIR")]
    pub tls_dir: Option<PathBuf>,
    /// Host name in the standby's certificate, if it differs from the address
    #[arg(long, value_name = "NAME", requires = "tls_dir")]
    pub tls_hostname: Option<String>,
    /// Limit of the output that waits at each network card. Further packets are dropped
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = units::parse_size)]
    pub output_limit: u64,
    /// Limit of the memory for checkpoints that are being sent [default: 256M for a QEMU, the VM's setting for a Sterna
    /// VM]. The guest resumes as soon as the checkpoint is in this memory; if it does not fit, the guest stays paused
    /// until the rest has been sent. 0M (QEMU): the guest stays paused until the standby has the checkpoint
    #[arg(long, value_name = "SIZE", value_parser = units::parse_size)]
    pub checkpoint_buffer: Option<u64>,
    /// Directory in which this command creates a directory for its sockets to QEMU. QEMU must have access to it
    /// [default: the temporary directory]
    #[arg(long, value_name = "DIR")]
    pub socket_dir: Option<PathBuf>,
    /// Watchdog of this host, such as /dev/watchdog. It resets the host if QEMU's guest still runs after its lease has
    /// ended. The lease must be at least 1s. The watchdog stays active if this command is killed
    #[arg(long, value_name = "DEVICE")]
    pub watchdog: Option<PathBuf>,
    /// Listen here for `sterna info`, `sterna unprotect` and `sterna decide`: unix:PATH or tcp:HOST:PORT
    #[arg(long, value_name = "SOCKET")]
    pub qmp: Option<Endpoint>,
    /// Disk to replicate to the standby (repeat for more disks). NODE: QEMU's block node, which must be a quorum. NAME:
    /// the disk's name at the standby, if it differs. The content is copied first, while the guest runs
    #[arg(long, value_name = "NODE[=NAME]", value_parser = disks::parse)]
    pub disk: Vec<ProtectedDisk>,
    /// Serve the figures for Prometheus at http://ADDRESS/metrics: HOST:PORT or unix:PATH
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<String>,
    /// Print JSON, one line per second
    #[arg(long)]
    pub json: bool,
    /// When the protection ends, write its record to a file, for `sterna report`
    #[arg(long, value_name = "FILE.json")]
    pub report: Option<PathBuf>,
    /// Checkpoints of a Sterna VM.
    #[command(flatten)]
    pub checkpoints: checkpoints::Checkpoints,
}

/// Protects the guest. Once the protection has begun, its record is written however it ends.
pub fn execute(arguments: &Arguments) -> Done {
    let interrupts = Interrupts::catch()?;
    let report = arguments.report.as_deref().map(Report::begin).transpose()?;
    let delay = Duration::from_millis(arguments.checkpoint_delay.into());
    let mut recorder = Recorder::new(&arguments.socket.to_string(), &arguments.standby, delay);
    let board = Board::new(Look::default());
    recorder.show_on(board.clone());
    let _metrics =
        MetricsServer::start_if(arguments.metrics.as_deref(), move || metrics::of_protection(&board.get()))?;
    let done = protect(arguments, &interrupts, &mut recorder);
    let Some(report) = report.filter(|_| recorder.has_begun()) else { return done };
    if let (Err(stop), None) = (&done, &recorder.record().end) {
        recorder.end(None, None, &stop.message);
    }
    if let Err(error) = report.write_text(&recorder.record().to_json()) {
        // The exit status tells where the guest is. A record that cannot be written does not change it.
        terminal::note(&format!("sterna: warning: {error}"));
    }
    done
}

fn protect(arguments: &Arguments, interrupts: &Interrupts, recorder: &mut Recorder) -> Done {
    let protection = new_protection(arguments.generation).map_err(|error| Stop::failed(error.to_string()))?;
    // An error in the arguments takes precedence over a monitor that does not answer.
    let checked = check(arguments).and_then(|()| request(arguments, protection));
    let mut monitor = match Monitor::connect(&arguments.socket) {
        Ok(monitor) => monitor,
        // With `--standby-qmp`, the arguments are for a Sterna VM, so the checks for a QEMU do not matter.
        Err(stop) if arguments.standby_qmp.is_some() => return Err(stop),
        Err(stop) => return Err(checked.err().unwrap_or(stop)),
    };
    if monitor.is_sterna() {
        return own::execute(arguments, monitor, interrupts, recorder);
    }
    let mut request = checked?;
    request.parameters = monitor.parameters(&arguments.set)?;
    request.copying = Some(disks::progress(interrupts, arguments.json));
    let (claims, operator) = claims(arguments, protection)?;
    let session = until_interrupted(|cancel| {
        request.cancel = cancel.clone();
        QemuProtection::begin(monitor.into_vm(), request, claims)
    });
    let session = Arc::new(session.map_err(|error| {
        let stop = Stop::from(error);
        let advice = tls::name_advice(&stop.message, tls::NAME_OPTION);
        stop.with_more(advice)
    })?);
    for remark in session.remarks() {
        terminal::note(&format!("sterna: {remark}"));
    }
    let control = Arc::new(Control::new(Arc::clone(&session), operator));
    let server = arguments.qmp.as_ref().map(|endpoint| control.listen(endpoint)).transpose();
    let server = match server {
        Ok(server) => server,
        Err(stop) => {
            let _ = session.unprotect();
            return Err(match session.finish() {
                Ok(_) => stop,
                Err(error) => stop.with_more(&format!("; {error}")),
            });
        }
    };
    let done = watch(&session, &control, arguments, interrupts, recorder);
    let done = done.and_then(|()| session.finish().map_err(Stop::from));
    control.ended(&done);
    if let Some(server) = server {
        server.close();
    }
    let ended = done?;
    let done = end(arguments, &session, &ended);
    let last = Look::at_qemu(words::outcome(ended.outcome), &session.statistics());
    // If an operator ended the protection, the closed stream is not the reason.
    recorder.look(Look { why: last.why.filter(|_| done.is_err()), ..last });
    let how = match (&done, ended.outcome) {
        (Err(stop), _) => stop.message.as_str(),
        (Ok(_), Outcome::HandedOver) => "handed over as planned: the guest runs at the standby",
        (Ok(_), _) if !ended.runs_here => {
            "the QEMU was ended, and the protection with it: the standby does not take over"
        }
        (Ok(_), _) => "an operator ended the protection: the guest continues to run at the primary",
    };
    let guest_at = match ended.outcome {
        Outcome::HandedOver | Outcome::Lost => Some(GuestAt::Standby),
        _ => ended.runs_here.then_some(GuestAt::Primary),
    };
    recorder.end(None, guest_at, how);
    done
}

/// Refuses options that do not apply to a QEMU.
fn check(arguments: &Arguments) -> Result<(), Stop> {
    if arguments.standby_qmp.is_some() {
        return Err(Stop::usage(
            "--standby-qmp is only for a Sterna VM: the standby of a QEMU is `sterna standby`",
        ));
    }
    if let Some(option) = arguments.checkpoints.first() {
        return Err(Stop::usage(format!(
            "{option} is only for a Sterna VM: a QEMU takes its checkpoints only by the interval (--checkpoint-delay)"
        )));
    }
    if arguments.arbiter.to_string() == "ask" && arguments.qmp.is_none() {
        return Err(Stop::usage(
            "with the arbiter `ask`, an operator decides over this command's own socket: give it with --qmp, or \
             choose another arbiter with --arbiter",
        ));
    }
    Ok(())
}

/// Prints a line per second until the protection ends.
fn watch(
    session: &QemuProtection,
    control: &Control,
    arguments: &Arguments,
    interrupts: &Interrupts,
    recorder: &mut Recorder,
) -> Result<(), Stop> {
    let mut heard = 0;
    let mut due = Instant::now();
    let mut gone_since = None;
    let mut shown = show::Shown::default();
    while session.outcome().is_none() {
        // The standby may not have received the message about QEMU's end yet.
        let is_gone =
            session.is_qemu_gone() && gone_since.get_or_insert_with(Instant::now).elapsed() > LAST_WORD;
        if is_gone && session.outcome().is_none() {
            return Err(Stop::failed(format!(
                "{} has ended, and its guest with it: this side does not claim the guest, and the standby may take \
                 over",
                arguments.socket
            )));
        }
        let now = session.statistics();
        recorder.look(Look::at_qemu(words::word(now.contact.state), &now));
        if Instant::now() >= due {
            due = Instant::now() + LINE;
            terminal::print(&shown.line(arguments.json, &now));
            control.measured(shown.per_second());
            if let Some(note) = shown.note(&now, arguments.qmp.as_ref()) {
                terminal::note(&format!("sterna: {note}"));
            }
        }
        interrupts.sleep(LOOK, heard);
        if interrupts.count() > heard {
            heard = interrupts.count();
            if heard >= 2 {
                return Err(left(arguments));
            }
            match session.unprotect() {
                Ok(()) => terminal::note(
                    "ending the protection: waiting for the standby's confirmation (Ctrl-C again exits and leaves \
                     QEMU as it is)",
                ),
                Err(refusal) => terminal::note(&format!(
                    "sterna: {refusal} (Ctrl-C again exits and leaves QEMU as it is)"
                )),
            }
        }
    }
    Ok(())
}

/// The error after a second Ctrl-C, which leaves the protection as it is.
fn left(arguments: &Arguments) -> Stop {
    Stop::with(
        Status::Undecided,
        format!(
            "interrupted: {0} is still in COLO, its guest has no network any more, and the standby may take over. \
             Find out whether the standby runs the guest. If it does not and never will, run `sterna unprotect {0} \
             --vouch`; else send `quit` to the QEMU",
            arguments.socket
        ),
    )
}

fn end(arguments: &Arguments, session: &QemuProtection, end: &ProtectionEnd) -> Done {
    let now = session.statistics();
    let lost = now.lost_because;
    let why = lost.as_deref().unwrap_or("no reason is known");
    terminal::print(&show::end(arguments.json, end, session));
    for left in &end.left {
        terminal::note(&format!("sterna: warning: {left}"));
    }
    match end.outcome {
        Outcome::Alone(_) if !end.runs_here => {
            let why = now.ended_because.as_deref().unwrap_or("QEMU has ended");
            terminal::note(&format!(
                "{why}: the protection has ended at both sides, and the standby does not take over"
            ));
            Ok(Status::Done)
        }
        Outcome::Lost if session.is_qemu_gone() => Err(Stop::failed(format!(
            "{} has ended, and its guest with it: this side does not claim the guest any more, and the standby takes \
             over",
            arguments.socket
        ))),
        Outcome::Alone(Because::Never) | Outcome::Failed(Cause::Cancelled)
            if let Some(why) = &now.ended_because =>
        {
            let next = match end.is_protectable {
                true => "protect it again",
                false => "it can be protected again when it runs in another QEMU process",
            };
            Err(Stop::failed(format!(
                "{why}. The protection was ended, and the guest continues to run here: {next}"
            )))
        }
        Outcome::Alone(Because::Never) | Outcome::HandedOver => Ok(Status::Done),
        Outcome::Alone(Because::Claim) => Err(Stop::failed(format!(
            "the standby was lost ({why}), and this side has won the claim: the guest continues to run here, \
             unprotected"
        ))),
        Outcome::Failed(Cause::Cancelled) => {
            Err(Stop::with(Status::Cancelled, "cancelled; the guest continues to run here, unprotected"))
        }
        Outcome::Failed(_) => {
            Err(Stop::failed(format!("the guest is not protected, and continues to run here: {why}")))
        }
        Outcome::Lost => Err(Stop::with(
            Status::Lost,
            format!(
                "the standby has the guest ({why}); the guest was ended here, and its waiting output is discarded"
            ),
        )),
    }
}

fn request(arguments: &Arguments, protection: Protection) -> Result<ProtectRequest, Stop> {
    let standby = peer::address(&arguments.standby)?;
    let contact = arguments.contact.as_deref().map(peer::address).transpose()?;
    let tls = match &arguments.tls_dir {
        Some(directory) => {
            let tls = tls::of_directory(directory, TlsEndpoint::Client)?;
            Some(Tls { hostname: arguments.tls_hostname.clone(), ..tls })
        }
        None => None,
    };
    let secret = match &arguments.secret {
        Some(path) => secret::read(path)?,
        None if tls.is_none() && !is_here(&standby) => {
            return Err(Stop::usage(
                "a standby on another host must authenticate itself: give both sides certificates (--tls-dir) or the \
                 same secret (--secret)",
            ));
        }
        None => Secret::from_bytes([0; 32]),
    };
    let plain = ProtectRequest::new(standby, protection, secret);
    Ok(ProtectRequest {
        contact,
        tls,
        terms: Terms { lease: arguments.lease, ..Terms::default() },
        checkpoint_delay: Duration::from_millis(arguments.checkpoint_delay.into()),
        channels: arguments.channels.unwrap_or(0),
        most_waiting_bytes: arguments.output_limit,
        most_kept_bytes: arguments.checkpoint_buffer.unwrap_or(plain.most_kept_bytes),
        socket_directory: arguments.socket_dir.clone(),
        disks: arguments.disk.clone(),
        watchdog: arguments.watchdog.as_deref().map(crate::watchdog::named).transpose()?,
        ..plain
    })
}

/// The arbiter's claim for this side, and the operator's interface if the arbiter is `ask`.
fn claims(
    arguments: &Arguments,
    protection: Protection,
) -> Result<(Arc<dyn Claims>, Option<Operator>), Stop> {
    let opened = arguments.arbiter.open(DEFAULT_LIMIT).map_err(|error| Stop::usage(error.to_string()))?;
    Ok((
        claims::claims(arguments.arbiter.to_string(), &opened.arbiter, Role::Primary, protection),
        opened.operator,
    ))
}

fn is_here(address: &Address) -> bool {
    match address {
        Address::Tcp { host, .. } => {
            host == "localhost" || host.parse().is_ok_and(|address: IpAddr| address.is_loopback())
        }
        _ => true,
    }
}
