"""The hand-written part of the Murphi model: state, wire, conditions, effects, environment, properties.

Written from the protocol, not from the Python core: it exists to disagree with it. One P, one D, one room whose legs
come at most once, so attempt, uuid and digest need no numbers: "uuid" is whether one is known. Messages are bits:

P→D: 0 unknown, 1 pending, 2 ready, 3 failed echo 0, 4 failed echo 1, 5 done_ack
D→P: 0–2 hello that acknowledges epoch 0–2, 3 done, 4 + 4·uuid + 2·quiet + foreign: abort
"""

DECLARATIONS = """
type
  life: 0..2;
  room_state: enum { N, B, W, T, S, F };
  early_kind: enum { e_none, e_early_hello, e_early_abort };
  notice_kind: enum { n_none, n_done, n_abort };
  reg_stage: enum { g_none, g_open, g_taken, g_empty, g_closed };
  pull_stage: enum { u_none, u_queued, u_flying, u_reading, u_hung, u_arrived, u_dropped };
  event_name: enum { @EVENTS@ };
  to_d: 0..5;
  to_p: 0..11;
  ev: record
    name: event_name;
    msg: boolean; hello: boolean; abort: boolean; ready: boolean;
    epoch: life; ack: life; uuid: boolean; quiet: boolean; foreign: boolean; echo: boolean;
    late: boolean;
  end;

var
  -- P: the process, then its record of the room
  p_up: boolean; p_life: life; p_link: life; p_minted: boolean; p_crashes: 0..2;
  p_st: room_state; p_bound: boolean; p_peer_epoch: life; p_charged: boolean; p_uuid: boolean;
  p_offer: 0..2; p_registered: boolean; p_t_request: boolean; p_t_lease: boolean; p_t_tombstone: boolean;
  early_own: early_kind; early_own_epoch: life; early_other: early_kind; early_other_epoch: life;
  limbo: boolean; limbo_epoch: life;
  -- D
  d_up: boolean; d_life: life; d_link: life; d_minted: boolean; d_crashes: 0..2;
  d_st: room_state; d_candidate: boolean; d_noted: life; d_out: boolean; d_bound: boolean; d_bound_epoch: life;
  d_manifest: boolean; d_pulling: boolean; d_notice: notice_kind; d_notice_epoch: life;
  d_t_request: boolean; d_t_bootstrap: boolean; d_t_hello: boolean; d_t_notice: boolean; d_t_transfer: boolean;
  d_t_tombstone: boolean;
  d_knows: boolean; d_waiting: boolean; d_answered: boolean;
  -- between them
  pd: array [to_d] of array [1..2] of boolean;
  dp: array [to_p] of array [1..2] of boolean;
  -- transport, pages, legs
  reg: reg_stage; reg_p_life: life; reg_d_epoch: life; reg_waived: boolean;
  pull: pull_stage; pull_epoch: life; pull_abandoned: boolean;
  pages: boolean; lookup: boolean; committed: boolean;
  p_came: boolean; p_waits: boolean; d_came: boolean; d_waits: boolean;
"""

HELPERS = """
function live_p(): boolean; begin return p_st = B | p_st = W | p_st = T; end;
function live_d(): boolean; begin return d_st = B | d_st = W | d_st = T; end;

procedure p_forgets();
begin
  p_bound := false; p_peer_epoch := 0; p_charged := false; p_uuid := false; p_offer := 0; p_registered := false;
  p_t_request := false; p_t_lease := false; p_t_tombstone := false;
end;

procedure d_forgets();
begin
  d_candidate := false; d_noted := 0; d_out := false; d_bound := false; d_bound_epoch := 0; d_manifest := false;
  d_pulling := false; d_notice := n_none; d_notice_epoch := 0; d_t_request := false; d_t_bootstrap := false;
  d_t_hello := false; d_t_notice := false; d_t_transfer := false; d_t_tombstone := false;
end;

procedure s_kept(); begin if p_st = N then p_forgets(); end; end;

procedure r_kept();
begin
  if d_st = N then d_forgets(); end;
  if d_st = N | d_candidate then lookup := false; end;
end;

procedure say_p(m: to_p; l: life);
var n: 0..30;
begin
  if p_up & (d_link = 0 | d_link = p_life) & !dp[m][l] then
    n := 0;
    for i: to_p do for j: 1..2 do if dp[i][j] then n := n + 1; end; end; end;
    if n < WIRE then dp[m][l] := true; end;
  end;
end;

procedure say_d(m: to_d; l: life);
var n: 0..30;
begin
  if d_up & (p_link = 0 | p_link = d_life) & !pd[m][l] then
    n := 0;
    for i: to_d do for j: 1..2 do if pd[i][j] then n := n + 1; end; end; end;
    if n < WIRE then pd[m][l] := true; end;
  end;
end;

-- P answers whoever spoke, or tells the bound D
procedure p_says(e: ev; m: to_d); begin if e.msg | p_bound then say_d(m, p_life); end; end;

procedure withdrawn(); begin if reg != g_none & reg != g_closed then reg := g_empty; end; end;

procedure send_abort(known: boolean; quiet: boolean; foreign: boolean);
var m: to_p;
begin
  m := 4;
  if known then m := m + 4; end;
  if quiet then m := m + 2; end;
  if foreign then m := m + 1; end;
  say_p(m, d_life);
end;

procedure send_notice();
begin
  if d_notice = n_done then say_p(3, d_life);
  elsif d_notice = n_abort then send_abort(d_manifest & d_bound, !d_pulling, false);
  end;
end;

procedure arm_notice(); begin d_t_notice := d_notice != n_none; end;
"""

CONDITIONS = """
function sif_early_hello(e: ev): boolean; begin return early_own = e_early_hello; end;
function sif_early_abort(e: ev): boolean; begin return early_own = e_early_abort; end;
function sif_ack_none(e: ev): boolean; begin return e.hello & e.ack = 0; end;
function sif_ack_foreign(e: ev): boolean; begin return e.hello & e.ack != 0 & e.ack != p_life; end;
function sif_foreign_fingerprint(e: ev): boolean; begin return false; end;
function sif_foreign_digest(e: ev): boolean; begin return e.foreign & !(e.abort & p_bound); end;
function sif_bound(e: ev): boolean;
begin
  if e.name = e_peer_reborn then return p_bound & p_peer_epoch < e.epoch; end;
  return p_bound;
end;
function sif_gated(e: ev): boolean; begin return false; end;
function sif_budget_free(e: ev): boolean; begin return !p_charged & !limbo; end;
function sif_attempt_newer(e: ev): boolean; begin return false; end;
function sif_attempt_older(e: ev): boolean; begin return false; end;
function sif_uuid_mine(e: ev): boolean; begin return p_registered & e.uuid = p_uuid; end;
function sif_uuid_of_my_epoch(e: ev): boolean; begin return e.uuid & p_minted; end;
function sif_quiet(e: ev): boolean; begin return e.quiet; end;

function rif_from_candidate(e: ev): boolean; begin return d_candidate & !d_out; end;
function rif_last_candidate(e: ev): boolean; begin return true; end;
function rif_from_bound(e: ev): boolean; begin return d_bound; end;
function rif_newer_life(e: ev): boolean;
begin
  if d_bound then return e.epoch > d_bound_epoch; end;
  return d_candidate & e.epoch > d_noted;
end;
function rif_agrees(e: ev): boolean; begin return e.ready; end;
function rif_has_uuid(e: ev): boolean; begin return d_manifest; end;
function rif_same_uuid(e: ev): boolean; begin return d_manifest & e.ready; end;
function rif_uuid_mine(e: ev): boolean; begin return d_manifest & e.uuid; end;
function rif_pages_taken(e: ev): boolean; begin return e.name = e_start; end;
function rif_fresh(e: ev): boolean; begin return d_knows & d_answered; end;
function rif_quiet(e: ev): boolean; begin return !d_pulling; end;
function rif_echo(e: ev): boolean; begin return e.echo; end;
function rif_noticed(e: ev): boolean; begin return d_notice != n_none; end;
function rif_notice_epoch(e: ev): boolean; begin return d_notice != n_none & e.epoch >= d_notice_epoch; end;
function rif_no_notice(e: ev): boolean; begin return d_notice = n_none; end;
"""

EFFECTS = """
procedure sdo_answer_duplicate(e: ev); begin end;
procedure sdo_answer_bad(e: ev); begin p_waits := false; end;
procedure sdo_answer_refused(e: ev); begin p_waits := false; end;
procedure sdo_arm_request(e: ev); begin p_t_request := true; end;
procedure sdo_arm_bootstrap(e: ev); begin end;
procedure sdo_bury(e: ev); begin p_t_request := false; p_t_lease := false; p_t_tombstone := true; end;
procedure sdo_forget(e: ev); begin p_t_request := false; p_t_lease := false; p_t_tombstone := false; end;
procedure sdo_engine_stop(e: ev); begin p_waits := false; end;
procedure sdo_remember_early(e: ev);
begin
  if e.foreign then
    early_other := e_early_abort; early_other_epoch := e.epoch;
  else
    if e.abort then early_own := e_early_abort;
    elsif early_own = e_none then early_own := e_early_hello; end;
    early_own_epoch := e.epoch;
  end;
end;
procedure sdo_forget_early(e: ev);
begin
  if e.name = e_early_timer & e.foreign then early_other := e_none; early_other_epoch := 0;
  else
    early_own := e_none; early_own_epoch := 0;
    if e.name != e_early_timer then early_other := e_none; early_other_epoch := 0; end;
  end;
end;
procedure sdo_bind(e: ev); begin p_bound := true; p_peer_epoch := e.epoch; p_t_lease := true; end;
procedure sdo_bind_early(e: ev); begin p_bound := true; p_peer_epoch := early_own_epoch; p_t_lease := true; end;
procedure sdo_renew(e: ev);
begin
  if e.epoch > p_peer_epoch then p_peer_epoch := e.epoch; end;
  p_t_lease := true;
end;
procedure sdo_say_unknown(e: ev); begin p_says(e, 0); end;
procedure sdo_say_pending(e: ev); begin p_says(e, 1); end;
procedure sdo_say_ready(e: ev); begin p_says(e, 2); end;
procedure sdo_say_failed(e: ev); begin p_says(e, 3); end;
procedure sdo_say_failed_echo(e: ev); begin p_says(e, 4); end;
procedure sdo_answer_abort(e: ev); begin if e.quiet then p_says(e, 4); else p_says(e, 3); end; end;
procedure sdo_say_done_ack(e: ev); begin p_says(e, 5); end;
procedure sdo_reserve(e: ev); begin p_charged := true; end;
procedure sdo_keep_arrays(e: ev); begin p_offer := 2; p_uuid := true; p_minted := true; p_t_lease := true; end;
procedure sdo_register(e: ev);
begin
  p_registered := true; p_offer := 1;
  reg := g_open; reg_p_life := p_life; reg_d_epoch := p_peer_epoch; reg_waived := false;
end;
procedure sdo_drop_arrays(e: ev); begin p_offer := 0; end;
procedure sdo_withdraw(e: ev); begin p_offer := 0; withdrawn(); end;
procedure sdo_release_arrays(e: ev); begin p_offer := 0; withdrawn(); end;
procedure sdo_withdraw_again(e: ev); begin if e.uuid & p_minted then withdrawn(); end; end;
procedure sdo_free_budget(e: ev); begin p_charged := false; end;
procedure sdo_to_limbo(e: ev); begin limbo := true; limbo_epoch := p_peer_epoch; p_charged := false; end;
procedure sdo_free_limbo(e: ev);
begin
  if !(e.name = e_peer_reborn & limbo_epoch >= e.epoch) then limbo := false; limbo_epoch := 0; end;
end;
procedure sdo_count_late_done(e: ev); begin end;

procedure rdo_answer_duplicate(e: ev); begin end;
procedure rdo_answer_bad(e: ev); begin d_waits := false; end;
procedure rdo_answer_refused(e: ev); begin d_waits := false; end;
procedure rdo_arm_request(e: ev); begin d_t_request := true; end;
procedure rdo_arm_bootstrap(e: ev); begin d_t_bootstrap := true; end;
procedure rdo_bury(e: ev);
begin
  d_t_request := false; d_t_bootstrap := false; d_t_transfer := false; d_t_hello := false; d_t_tombstone := true;
end;
procedure rdo_forget(e: ev); begin d_forgets(); end;
procedure rdo_engine_stop(e: ev);
begin
  d_waits := false; pages := false;
  if pull = u_arrived then pull := u_none; pull_epoch := 0; pull_abandoned := false; end;
end;
procedure rdo_mint_attempt(e: ev); begin d_minted := true; end;
procedure rdo_lookup(e: ev); begin lookup := true; end;
procedure rdo_note_candidates(e: ev); begin d_candidate := true; d_noted := e.ack; end;
procedure rdo_drop_candidate(e: ev); begin d_out := true; end;
procedure rdo_say_hello(e: ev);
begin
  if d_bound then say_p(d_bound_epoch, d_life);
  elsif d_candidate & !d_out then say_p(0, d_life);
  end;
  if d_bound | (d_candidate & !d_out) then
    if !d_knows then d_answered := false; end;
    d_knows := true; d_waiting := true;
  end;
  if !d_bound then lookup := true; end;
  d_t_hello := true;
end;
procedure rdo_bind_peer(e: ev); begin d_bound := true; d_bound_epoch := e.epoch; d_t_bootstrap := false; d_t_hello := true; end;
procedure rdo_abort_others(e: ev); begin arm_notice(); end;
procedure rdo_abort_dropped(e: ev); begin arm_notice(); end;
procedure rdo_notice_abort(e: ev);
begin
  if (e.name = e_candidates & !d_bound) | d_bound | (d_candidate & !d_out) then
    if !(e.name = e_candidates & d_bound) then
      d_notice := n_abort; d_notice_epoch := 0;
      if d_bound then d_notice_epoch := d_bound_epoch; end;
      send_notice();
    end;
  end;
  arm_notice();
end;
procedure rdo_notice_done(e: ev);
begin
  d_pulling := false;
  d_notice := n_done; d_notice_epoch := d_bound_epoch;
  send_notice(); arm_notice();
end;
procedure rdo_notice_again(e: ev);
begin
  if d_notice = n_none then
    if d_st = S then d_notice := n_done; else d_notice := n_abort; end;
    d_notice_epoch := e.epoch;
  end;
  if e.epoch > d_notice_epoch then d_notice_epoch := e.epoch; end;
  send_notice(); arm_notice();
end;
procedure rdo_notice_quiet(e: ev); begin d_pulling := false; send_notice(); arm_notice(); end;
procedure rdo_repeat_notice(e: ev);
begin
  if e.late & !d_pulling then d_notice := n_none; d_notice_epoch := 0; else send_notice(); end;
  arm_notice();
end;
procedure rdo_end_notice(e: ev);
begin
  if d_notice != n_none & !(e.name = e_peer_reborn & e.epoch <= d_notice_epoch) then
    d_notice := n_none; d_notice_epoch := 0; arm_notice();
  end;
end;
procedure rdo_reply_abort(e: ev); begin send_abort(e.ready, true, !e.ready & d_st = N); end;
procedure rdo_renew_tombstone(e: ev); begin d_t_tombstone := true; end;
procedure rdo_note_ready(e: ev); begin d_manifest := true; end;
procedure rdo_start_pull(e: ev);
begin
  d_pulling := true; d_t_transfer := true;
  pull := u_queued; pull_epoch := d_bound_epoch; pull_abandoned := false; pages := true;
end;
procedure rdo_deliver(e: ev); begin d_pulling := false; end;
procedure rdo_abandon_pull(e: ev); begin if d_pulling & pull != u_none then pull_abandoned := true; end; end;
"""
