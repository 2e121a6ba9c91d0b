// No page and no question before the mail.
pref("app.donation.eoy.version.viewed", 999);
pref("datareporting.policy.dataSubmissionPolicyBypassNotification", true);
pref("mail.rights.version", 1);
pref("mail.shell.checkDefaultClient", false);
pref("mail.spotlight.firstRunDone", true);
pref("mailnews.start_page.enabled", false);
